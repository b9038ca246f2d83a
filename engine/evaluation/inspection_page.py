"""The page that `inspect` writes: one HTML file with everything in it, for a browser without a network."""

from __future__ import annotations

import html
import json
from typing import Any

from .report import document

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f2a; --dim: #6b7280; --line: #e3e5ec; --page: #fafafc; --card: #fff;
  --heat: 217 119 6; --accent: #b45309; --gone: #a9adb8; --strip: #f1f2f6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9f0; --dim: #969cab; --line: #2b303b; --page: #12141a;
  --card: #191c24; --heat: 251 191 36; --accent: #fbbf24; --gone: #565c69; --strip: #20242d; } }
* { box-sizing: border-box; }
body { margin: 0; font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink);
  background: var(--page); }
header { padding: 1.1rem 1.6rem 0.7rem; display: flex; flex-wrap: wrap; gap: 0.4rem 1.6rem; align-items: baseline; }
h1 { font-size: 1.15rem; margin: 0; font-weight: 650; } header span { color: var(--dim); }
header b { color: var(--ink); font-variant-numeric: tabular-nums; }
select, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 0.15rem 0.55rem; cursor: pointer; }
button[aria-pressed=true] { border-color: var(--accent); color: var(--accent); font-weight: 600; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
main { display: grid; grid-template-columns: minmax(20rem, 34rem) minmax(0, 1fr); gap: 1.2rem;
  padding: 0.3rem 1.6rem 2rem; align-items: start; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
#map { position: sticky; top: 0.8rem; max-height: calc(100vh - 1.6rem); overflow-y: auto; padding: 0.8rem; }
#map h2 { font-size: 0.8rem; font-weight: 600; color: var(--dim); margin: 0 0 0.5rem; }
.layer { display: grid; grid-template-columns: 2.2rem 1fr 6.8rem 3rem; gap: 0.5rem; align-items: center; width: 100%;
  border: 0; border-radius: 5px; padding: 1px 4px; background: none; font-size: 11px; text-align: left; }
button.layer:hover { background: var(--strip); } .layer[aria-pressed=true] { background: rgb(var(--heat) / 0.18); }
.layer canvas { width: 100%; height: 9px; background: var(--strip); border-radius: 2px; display: block; }
.bar { position: relative; height: 9px; background: var(--strip); border-radius: 2px; }
.bar i { position: absolute; inset: 0 auto 0 0; background: rgb(var(--heat) / 0.85); border-radius: 2px; }
.bar u { position: absolute; top: -2px; bottom: -2px; width: 2px; background: var(--ink); opacity: 0.75; }
.count { text-align: right; font-variant-numeric: tabular-nums; color: var(--dim); }
#heads { display: flex; flex-wrap: wrap; gap: 0.3rem; margin: 0.6rem 0 0; font-size: 12px; min-height: 1.9rem; }
#text { padding: 0.8rem 1.2rem 1.4rem; }
#document { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; font-size: 14.5px; }
#document span { border-radius: 2px; padding: 0.05em 0; }
.h0 { color: var(--gone); } .only .h0 { opacity: 0.25; }
.special { font-size: 0.78em; font-family: ui-monospace, monospace; }
.window { box-shadow: inset 0 -2px 0 rgb(var(--heat) / 0.55); } .flash { outline: 2px solid var(--accent); }
.legend { display: flex; flex-wrap: wrap; gap: 0.3rem 0.9rem; align-items: center; color: var(--dim); font-size: 12px;
  margin-bottom: 0.8rem; }
.ramp { display: inline-block; width: 8rem; height: 10px; border-radius: 3px; vertical-align: middle;
  background: linear-gradient(90deg, rgb(var(--heat) / 0.06), rgb(var(--heat) / 0.9)); }
#tip { position: fixed; pointer-events: none; background: var(--ink); color: var(--page); border-radius: 6px;
  padding: 0.25rem 0.55rem; font-size: 12px; max-width: 22rem; opacity: 0; transition: opacity 0.1s; z-index: 3; }
@media (max-width: 60rem) { main { grid-template-columns: 1fr; } #map { position: static; max-height: 45vh; } }
""" + "".join(f".h{step} {{ background: rgb(var(--heat) / {0.04 + 0.086 * step:.3f}); }}\n" for step in range(1, 11))

SCRIPT = r"""
const data = JSON.parse(document.getElementById('data').textContent);
const n = data.tokens.length, L = data.layers, K = data.heads, stride = Math.ceil(n / 8);
const $ = id => document.getElementById(id);
const state = { cell: 0, layer: -1, head: -1 };
const decoded = new Map();
const spans = [];

function bits(cell, layer) {
  const key = cell * L + layer;
  if (!decoded.has(key)) decoded.set(key, Uint8Array.from(atob(data.cells[cell].bits[layer]), c => c.charCodeAt(0)));
  return decoded.get(key);
}
function addRow(counts, row, head) {
  for (let i = 0; i < n; i++) counts[i] += (row[head * stride + (i >> 3)] >> (i & 7)) & 1;
}
function counts(cell, layer, head) {
  const found = new Uint16Array(n);
  for (let l = layer < 0 ? 0 : layer; l < (layer < 0 ? L : layer + 1); l++)
    for (let h = head < 0 ? 0 : head; h < (head < 0 ? K : head + 1); h++) addRow(found, bits(cell, l), h);
  return { found, rows: (layer < 0 ? L : 1) * (head < 0 ? K : 1) };
}
const sum = list => list.reduce((a, b) => a + b, 0);
const whole = x => x.toLocaleString('en-US', { maximumFractionDigits: 0 });

function shade() {
  const { found, rows } = counts(state.cell, state.layer, state.head);
  for (let i = 0; i < n; i++) {
    const step = found[i] ? Math.max(1, Math.round(10 * found[i] / rows)) : 0;
    spans[i].className = 'h' + step + (data.control.has(i) ? ' special' : '') + (i >= n - data.window ? ' window' : '');
  }
  state.found = found; state.rows = rows;
  const never = found.reduce((a, x) => a + (x === 0), 0);
  $('shown').textContent = (state.layer < 0 ? 'all layers' : 'layer ' + state.layer) +
    (state.head < 0 ? '' : ', KV head ' + state.head) + ': ' + whole(sum(found) / rows) + ' of ' + whole(n) +
    ' tokens a row, ' + whole(never) + ' in no row';
}
function strip(canvas, layer) {
  const width = Math.max(60, Math.round(canvas.clientWidth * devicePixelRatio)), context = canvas.getContext('2d');
  const { found, rows } = counts(state.cell, layer, -1);
  canvas.width = width; canvas.height = 1;
  const heat = getComputedStyle(document.documentElement).getPropertyValue('--heat').trim().split(/\s+/).map(Number);
  const image = context.createImageData(width, 1);
  for (let x = 0; x < width; x++) {
    const from = Math.floor(x * n / width), to = Math.max(from + 1, Math.floor((x + 1) * n / width));
    let total = 0;
    for (let i = from; i < to && i < n; i++) total += found[i];
    const share = total / ((to - from) * rows);
    image.data.set([...heat, share ? Math.round(40 + 215 * Math.sqrt(share)) : 0], 4 * x);
  }
  context.putImageData(image, 0, 0);
}
function layers() {
  const cell = data.cells[state.cell], means = cell.lengths.map(row => sum(row) / K);
  const top = Math.max(...means), weight = sum(cell.preferences) || 1;
  const even = cell.preferences.every(p => p === cell.preferences[0]);
  const most = Math.max(...cell.preferences) / weight || 1;
  $('layers').replaceChildren(...means.map((mean, layer) => {
    const row = document.createElement('button');
    row.className = 'layer';
    row.title = 'layer ' + layer + ': ' + cell.lengths[layer].map(whole).join(' / ') + ' tokens by KV head' +
      (even ? '' : ', preference ' + (100 * cell.preferences[layer] / weight).toFixed(1) + '%');
    const mark = even ? '' : '<u style="left:calc(' + 100 * cell.preferences[layer] / weight / most + '% - 1px)"></u>';
    row.innerHTML = '<span>' + layer + '</span><canvas></canvas><span class="bar"><i style="width:' +
      100 * mean / top + '%"></i>' + mark + '</span><span class="count">' + whole(mean) + '</span>';
    row.onclick = event => {
      const canvas = row.querySelector('canvas').getBoundingClientRect();
      const inside = event.clientX > canvas.left && event.clientX < canvas.right;
      choose(state.layer === layer && !inside ? -1 : layer, -1);
      if (inside && event.detail) reveal(Math.floor(n * (event.clientX - canvas.left) / canvas.width));
    };
    return row;
  }));
  [...$('layers').children].forEach((row, layer) => strip(row.querySelector('canvas'), layer));
  $('share').textContent = (100 * cell.share).toFixed(1) + '%';
  $('mean').textContent = whole(sum(means) / L);
}
function reveal(i) {
  spans[i].scrollIntoView({ block: 'center', behavior: 'smooth' });
  spans[i].classList.add('flash');
  setTimeout(() => spans[i].classList.remove('flash'), 1500);
}
function heads() {
  const make = (text, head) => {
    const button = document.createElement('button');
    button.textContent = text;
    button.setAttribute('aria-pressed', state.head === head);
    button.onclick = () => choose(state.layer, head);
    return button;
  };
  const lengths = state.layer < 0 ? null : data.cells[state.cell].lengths[state.layer];
  $('heads').replaceChildren(make('all heads', -1), ...Array.from({ length: K }, (_, h) =>
    make('head ' + h + (lengths ? ' (' + whole(lengths[h]) + ')' : ''), h)));
}
function choose(layer, head) {
  state.layer = layer; state.head = head;
  [...$('layers').children].forEach((row, i) => row.setAttribute('aria-pressed', i === layer));
  $('all').setAttribute('aria-pressed', layer < 0);
  heads(); shade();
}
function take(cell) {
  state.cell = cell;
  layers(); choose(state.layer, state.head);
}

data.control = new Set(data.control);
const page = document.createDocumentFragment();
data.tokens.forEach((text, i) => {
  const span = document.createElement('span');
  span.textContent = text; span.dataset.i = i;
  spans.push(span); page.append(span);
});
$('document').append(page);
data.cells.forEach((cell, i) => $('cell').add(new Option(cell.policy + ', budget ' + cell.budget, i)));
$('cell').onchange = event => take(Number(event.target.value));
$('all').onclick = () => choose(-1, state.head);
$('only').onclick = event => {
  const on = $('document').classList.toggle('only');
  event.target.setAttribute('aria-pressed', on);
};
$('document').onmousemove = event => {
  const i = event.target.dataset.i, tip = $('tip');
  if (i === undefined) { tip.style.opacity = 0; return; }
  tip.textContent = 'token ' + whole(Number(i)) + ': kept in ' + state.found[i] + ' of ' + state.rows + ' rows' +
    (i >= n - data.window ? ' (window, always kept)' : '');
  tip.style.opacity = 1;
  tip.style.left = Math.min(event.clientX + 12, innerWidth - 260) + 'px';
  tip.style.top = Math.min(event.clientY + 14, innerHeight - 40) + 'px';
};
$('document').onmouseleave = () => { $('tip').style.opacity = 0; };
addEventListener('resize', () => [...$('layers').children].forEach((r, l) => strip(r.querySelector('canvas'), l)));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', layers);
take(0);
"""

BODY = """
<header><h1>{title}</h1>
<span><b>{tokens}</b> tokens, {layers} layers of {heads} KV heads</span>
<label>policy <select id="cell"></select></label>
<span>kept <b id="share"></b>, <b id="mean"></b> tokens a layer and head</span></header>
<main>
<section id="map"><h2 class="layer"><span>layer</span><span>where in the text it kept tokens</span>
<span title="the bar is the layer's budget, the line its preference">budget, preference</span><span></span></h2>
<div id="layers"></div>
<div id="heads"></div></section>
<section id="text"><div class="legend"><button id="all" aria-pressed="true">all layers</button>
<button id="only" aria-pressed="false">fade what is gone</button>
<span>in few rows <i class="ramp"></i> in every row</span><span id="shown"></span></div>
<div id="document"></div></section>
</main>
<div id="tip" role="status"></div>
"""


def inspection_page(title: str, data: dict[str, Any]) -> str:
    """The whole page. data: tokens, control, window, layers, heads and cells, as `inspection.py` makes them."""
    body = BODY.format(
        title=html.escape(title),
        tokens=f"{len(data['tokens']):,}",
        layers=data["layers"],
        heads=data["heads"],
    )
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    data_block = f'<script type="application/json" id="data">{text}</script>'
    return document(title, STYLE, body + data_block, SCRIPT)
