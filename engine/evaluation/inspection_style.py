"""How the page of `inspect` looks, on a light and on a dark screen, wide and narrow."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1c2130; --dim: #667085; --line: #e4e6ee; --page: #f7f8fb; --card: #fff;
  --strip: #f0f2f7; --gone: #a3a9b8; --accent: #b2430a; --heat: 234 122 24;
  --ramp: #f0f2f7 #fde3bd #f9b15c #e8741f #b2430a #6d2208; --shadow: 0 1px 2px rgb(20 24 40 / 0.05), 0 6px 20px
  rgb(20 24 40 / 0.05); }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf1; --dim: #98a0b3; --line: #2a2f3c; --page: #0f1118;
  --card: #171a23; --strip: #1e222d; --gone: #596072; --accent: #ffb35c; --heat: 255 150 50;
  --ramp: #1e222d #4a2a1c #8f4114 #d6690f #ffa63d #ffe9b8; --shadow: none; } }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
  background: var(--page); }
header, main { max-width: 120rem; margin: 0 auto; padding: 0 clamp(0.7rem, 2vw, 1.8rem); }
header { padding-top: 1.1rem; padding-bottom: 0.8rem; display: flex; flex-wrap: wrap; gap: 0.5rem 1.6rem;
  align-items: center; }
h1 { font-size: 1.3rem; line-height: 1.3; margin: 0; font-weight: 680; letter-spacing: -0.01em; }
header p { margin: 0; color: var(--dim); }
header .figures { display: flex; flex-wrap: wrap; gap: 0.3rem 1.5rem; margin-left: auto; align-items: baseline; }
.figures b { color: var(--ink); font-size: 1.25rem; font-weight: 680; font-variant-numeric: tabular-nums; }
.figures span { color: var(--dim); }
select, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 7px; padding: 0.22rem 0.6rem; cursor: pointer; max-width: 100%; }
button:hover, select:hover { border-color: var(--dim); }
button[aria-pressed=true] { border-color: var(--accent); color: var(--accent); font-weight: 600; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; box-shadow: var(--shadow); }
main { display: grid; grid-template-columns: minmax(0, 1.55fr) minmax(24rem, 1fr); gap: 1rem; align-items: start;
  padding-bottom: 1.5rem; }
#map { padding: 0.7rem 0.9rem 0.8rem; position: sticky; top: 0.8rem; }
.row, .scale, .heads { display: grid; grid-template-columns: 2rem minmax(0, 1fr) 8rem 2.6rem; column-gap: 0.5rem;
  align-items: center; width: 100%; }
.heads { color: var(--dim); font-size: 11.5px; padding-bottom: 0.35rem; white-space: nowrap; }
.heads u, .key { text-decoration: none; border-left: 2px solid var(--ink); margin: 0 0.3rem 0 0.5rem; }
.row { height: var(--row); border: 0; border-radius: 3px; padding: 0; background: none; line-height: 1;
  font-size: min(11px, calc(var(--row) - 0.5px)); text-align: left; color: var(--dim);
  font-variant-numeric: tabular-nums; }
.row > span:first-child { text-align: right; padding-right: 0.2rem; white-space: nowrap; }
.row canvas { width: 100%; height: calc(var(--row) - 1px); display: block; background: var(--strip); }
.row[aria-pressed=true] { color: var(--accent); font-weight: 700; border-color: transparent;
  box-shadow: 0 0 0 1.5px var(--accent); background: var(--card); z-index: 1; }
.chosen .row:not([aria-pressed=true]) canvas, .chosen .row:not([aria-pressed=true]) .bar i { opacity: 0.45; }
#all { --row: 2.6rem; font-size: 11.5px; margin-bottom: 3px; } #all canvas { border-radius: 4px 4px 0 0; }
.bar { position: relative; height: calc(var(--row) - 1px); background: var(--strip); overflow: hidden; }
.bar i { position: absolute; inset: 0 auto 0 0; background: rgb(var(--heat) / 0.8); }
.bar u { position: absolute; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: var(--ink); }
.note { color: var(--dim); font-size: 11.5px; line-height: 1.25; align-self: end; font-weight: 400;
  white-space: normal; }
.count { text-align: right; }
#plot { position: relative; }
#view { position: absolute; top: 0; bottom: 0; border: 1.5px solid var(--ink); border-radius: 4px; opacity: 0.55;
  pointer-events: none; min-width: 3px; z-index: 1; }
#hair { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--ink); opacity: 0; pointer-events: none; }
.scale { font-size: 11px; color: var(--dim); height: 1.25rem; font-variant-numeric: tabular-nums; }
.ticks { position: relative; height: 100%; }
.ticks b { position: absolute; top: 0; border-left: 1px solid var(--gone); height: 5px; font-weight: 400; }
.ticks b span { position: absolute; top: 4px; transform: translateX(-50%); white-space: nowrap; }
.ticks b.last span { transform: translateX(-100%); } .ticks b.first span { transform: none; }
.tools { display: flex; flex-wrap: wrap; gap: 0.35rem 0.9rem; align-items: center; margin-top: 0.55rem;
  color: var(--dim); font-size: 12px; }
.tools button { padding: 0.12rem 0.5rem; } #heads { display: flex; flex-wrap: wrap; gap: 0.25rem; }
.ramp { display: inline-block; width: 6rem; margin: 0 0.2rem; height: 10px; border-radius: 3px; vertical-align: -1px;
  border: 1px solid var(--line); }
.key { border: 0; border-bottom: 2px solid rgb(var(--heat) / 0.75); margin: 0; }
#text { padding: 1rem clamp(0.8rem, 2vw, 1.8rem) 1.8rem; }
#document { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.8; font-size: 15px; max-width: 62rem;
  margin: 0 auto; }
#document span { border-radius: 2px; padding: 0.08em 0; }
.h0 { color: var(--gone); } .only .h0 { opacity: 0.28; }
.special { font-size: 0.76em; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.window { box-shadow: inset 0 -2px 0 rgb(var(--heat) / 0.75); } .flash { outline: 2.5px solid var(--accent); }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--page); border-radius: 7px;
  padding: 0.3rem 0.6rem; font-size: 12px; line-height: 1.4; max-width: 24rem; opacity: 0; transition: opacity 0.1s;
  z-index: 5; overflow-wrap: anywhere; }
@media (max-width: 72rem) { main { grid-template-columns: minmax(0, 1fr); } #map { position: static; } }
@media (max-width: 48rem) { header .figures { margin-left: 0; } #map { padding: 0.6rem 0.5rem; }
  .row, .scale, .heads { grid-template-columns: 1.4rem minmax(0, 1fr) 3.2rem 2.1rem; column-gap: 0.3rem; }
  .note, .unit { display: none; } #document { font-size: 14px; } }
@media print { #map { position: static; } #view { display: none; } }
""" + "".join(f".h{step} {{ background: rgb(var(--heat) / {0.05 + 0.07 * step:.3f}); }}\n" for step in range(1, 11))
