"""The page that `inspect` writes: one HTML file with everything in it, for a browser without a network."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from .inspection_style import STYLE
from .report import document

# every page's title begins so: what `inspect` may write over is known by it
TITLE = "What "

SCRIPT = r"""
const data = JSON.parse(document.getElementById('data').textContent);
const n = data.tokens.length, L = data.layers, K = data.heads, stride = Math.ceil(n / 8);
const $ = id => document.getElementById(id);
const state = { cell: 0, layer: -1, head: -1 };
const decoded = new Map(), spans = [], beside = matchMedia('(min-width: 72.01rem)');
const sum = list => list.reduce((a, b) => a + b, 0);
const whole = x => x.toLocaleString('en-US', { maximumFractionDigits: 0 });
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
data.control = new Set(data.control);

function bits(cell, layer) {
  const key = cell * L + layer;
  if (!decoded.has(key)) decoded.set(key, Uint8Array.from(atob(data.cells[cell].bits[layer]), c => c.charCodeAt(0)));
  return decoded.get(key);
}
function counts(cell, layer, head) {
  const found = new Uint16Array(n);
  for (let l = layer < 0 ? 0 : layer; l < (layer < 0 ? L : layer + 1); l++) {
    const table = bits(cell, l);
    for (let h = head < 0 ? 0 : head; h < (head < 0 ? K : head + 1); h++)
      for (let i = 0, at = h * stride; i < n; i++) found[i] += (table[at + (i >> 3)] >> (i & 7)) & 1;
  }
  return { found, rows: (layer < 0 ? L : 1) * (head < 0 ? K : 1) };
}
const window_of = () => data.cells[state.cell].window;

/* colours: the ramp of the style sheet, 256 steps */
function ramp() {
  const stops = style('--ramp').split(/\s+/).map(c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const x = i / 255 * (stops.length - 1), from = Math.min(Math.floor(x), stops.length - 2), part = x - from;
    return stops[from].map((c, j) => Math.round(c + part * (stops[from + 1][j] - c)));
  });
}
function binned(found, rows, width) {
  return Float64Array.from({ length: width }, (_, x) => {
    const from = Math.floor(x * n / width), to = Math.min(n, Math.max(from + 1, Math.floor((x + 1) * n / width)));
    let total = 0;
    for (let i = from; i < to; i++) total += found[i];
    return total / ((to - from) * rows);
  });
}
function pixels(canvas) { return Math.max(40, Math.round(canvas.clientWidth * devicePixelRatio)); }
function strip(canvas, layer, colours) {
  const width = pixels(canvas), { found, rows } = counts(state.cell, layer, state.head);
  canvas.width = width; canvas.height = 1;
  const context = canvas.getContext('2d'), image = context.createImageData(width, 1);
  binned(found, rows, width).forEach((share, x) =>
    image.data.set([...colours[share ? Math.round(36 + 219 * Math.sqrt(share)) : 0], 255], 4 * x));
  context.putImageData(image, 0, 0);
}
function profile(canvas, colours) {
  const width = pixels(canvas), height = Math.round(canvas.clientHeight * devicePixelRatio);
  const { found, rows } = counts(state.cell, -1, state.head), shares = binned(found, rows, width);
  canvas.width = width; canvas.height = height;
  const context = canvas.getContext('2d');
  shares.forEach((share, x) => {
    const tall = share ? Math.max(1, Math.sqrt(share) * (height - 1)) : 0;
    context.fillStyle = 'rgb(' + colours[Math.round(70 + 185 * Math.sqrt(share))].join(' ') + ')';
    context.fillRect(x, height - tall, 1, tall);
  });
}
function strips() {
  const colours = ramp();
  profile($('all').querySelector('canvas'), colours);
  [...$('layers').children].forEach((row, layer) => strip(row.querySelector('canvas'), layer, colours));
  $('ramp').style.background = 'linear-gradient(90deg,' + style('--ramp').split(/\s+/).join(',') + ')';
}
function row_height() {
  const room = beside.matches ? innerHeight - 270 : 340;
  const tall = Math.max(4, Math.min(beside.matches ? 22 : 13, Math.floor(room / L)));
  $('map').style.setProperty('--row', tall + 'px');
  $('all').style.setProperty('--row', beside.matches ? '56px' : '40px');
  return tall;
}
function layers() {
  const cell = data.cells[state.cell], means = cell.lengths.map(row => sum(row) / K);
  const weight = sum(cell.preferences) || 1, even = cell.preferences.every(p => p === cell.preferences[0]);
  const top = Math.max(...means), most = Math.max(...cell.preferences) / weight || 1, tall = row_height();
  const shown = layer => tall >= 9 || layer % Math.ceil(10 / tall) === 0;
  $('layers').replaceChildren(...means.map((mean, layer) => {
    const row = document.createElement('button'), share = cell.preferences[layer] / weight;
    row.className = 'row'; row.dataset.layer = layer;
    row.setAttribute('aria-label', 'layer ' + layer + ': ' + cell.lengths[layer].map(whole).join(' / ') +
      ' tokens by KV head' + (even ? '' : ', preference ' + (100 * share).toFixed(1) + '%'));
    const mark = even ? '' : '<u style="left:' + 97 * share / most + '%"></u>';
    row.innerHTML = '<span>' + (shown(layer) ? layer : '') + '</span><canvas></canvas><span class="bar"><i ' +
      'style="width:' + 97 * mean / top + '%"></i>' + mark + '</span><span class="count">' +
      (shown(layer) ? whole(mean) : '') + '</span>';
    return row;
  }));
  $('marks').innerHTML = 'budget' + (even ? '' : '<span class="unit"><u></u>preference</span>');
  $('share').textContent = (100 * cell.share).toFixed(1) + '%';
  $('mean').textContent = whole(sum(means) / L);
  strips();
}
function ticks() {
  const width = $('ticks').clientWidth, most = Math.max(2, width / 80), tens = 10 ** Math.floor(Math.log10(n / most));
  const step = [1, 2, 5, 10].map(x => x * tens).find(x => n / x <= most) || n, at = [0];
  for (let i = step; (n - i) / n * width > 56; i += step) at.push(i);
  at.push(n);
  $('ticks').innerHTML = at.map((i, j) => '<b class="' + (j ? j === at.length - 1 ? 'last' : '' : 'first') +
    '" style="left:' + 100 * i / n + '%"><span>' + whole(i) + '</span></b>').join('');
}
function heads() {
  const lengths = state.layer < 0 ? null : data.cells[state.cell].lengths[state.layer];
  const make = (text, head) => {
    const button = document.createElement('button');
    button.textContent = text;
    button.setAttribute('aria-pressed', state.head === head);
    button.onclick = () => choose(state.layer, head);
    return button;
  };
  $('heads').replaceChildren(make('all KV heads', -1), ...Array.from({ length: K > 1 ? K : 0 }, (_, h) =>
    make(lengths ? h + ' (' + whole(lengths[h]) + ')' : h, h)));
}
function shade() {
  const { found, rows } = counts(state.cell, state.layer, state.head), kept = window_of();
  for (let i = 0; i < n; i++) {
    const step = found[i] ? Math.max(1, Math.round(10 * found[i] / rows)) : 0;
    spans[i].className = 'h' + step + (data.control.has(i) ? ' special' : '') + (i >= n - kept ? ' window' : '');
  }
  state.found = found; state.rows = rows;
  const never = found.reduce((a, x) => a + (x === 0), 0);
  $('shown').textContent = (state.layer < 0 ? 'All layers' : 'Layer ' + state.layer) +
    (state.head < 0 ? '' : ', KV head ' + state.head) + ': ' + whole(sum(found) / rows) + ' of ' + whole(n) +
    ' tokens a row, ' + whole(never) + ' in no row';
}
function choose(layer, head) {
  const other = head !== state.head;
  state.layer = layer; state.head = head;
  [...$('layers').children].forEach((row, i) => row.setAttribute('aria-pressed', i === layer));
  $('all').setAttribute('aria-pressed', layer < 0);
  $('plot').classList.toggle('chosen', layer >= 0);
  heads(); shade();
  if (other) strips();
  const hash = '#cell=' + state.cell + (layer < 0 ? '' : '&layer=' + layer) + (head < 0 ? '' : '&head=' + head);
  try { history.replaceState(null, '', hash); } catch { /* a page in a sandbox has no history */ }
}
function take(cell) {
  state.cell = cell; $('cell').value = cell;
  layers(); choose(state.layer, state.head);
}
function reveal(i) {
  spans[i].scrollIntoView({ block: 'center', behavior: 'smooth' });
  spans[i].classList.add('flash');
  setTimeout(() => spans[i].classList.remove('flash'), 1600);
}

/* the map shows which part of the text is on the screen */
function first(below) {
  let low = 0, high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].getBoundingClientRect().bottom < below) low = middle + 1; else high = middle;
  }
  return low;
}
function view() {
  const from = first(0), to = Math.max(from, first(innerHeight));
  const canvas = $('all').querySelector('canvas').getBoundingClientRect(), plot = $('plot').getBoundingClientRect();
  $('view').style.left = canvas.left - plot.left + canvas.width * from / n + 'px';
  $('view').style.width = canvas.width * (to - from) / n + 'px';
}
function tell(event, text) {
  const tip = $('tip');
  tip.textContent = text; tip.style.opacity = text ? 1 : 0;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + 'px';
}
function place(event) {
  const canvas = $('all').querySelector('canvas').getBoundingClientRect(), x = event.clientX - canvas.left;
  return x < 0 || x >= canvas.width ? -1 : Math.floor(n * x / canvas.width);
}

const page = document.createDocumentFragment();
data.tokens.forEach((text, i) => {
  const span = document.createElement('span');
  span.textContent = text; span.dataset.i = i;
  spans.push(span); page.append(span);
});
$('document').append(page);
data.cells.forEach((cell, i) => $('cell').add(new Option(cell.policy + ', budget ' + cell.budget, i)));
$('cell').onchange = event => take(Number(event.target.value));
$('plot').onclick = event => {
  const row = event.target.closest('.row'), at = event.detail ? place(event) : -1;
  if (!row) return;
  const layer = Number(row.dataset.layer);
  choose(layer === state.layer && at < 0 ? -1 : layer, state.head);
  if (at >= 0) reveal(at);
};
$('plot').onmousemove = event => {
  const row = event.target.closest('.row'), at = place(event), hair = $('hair');
  hair.style.opacity = row && at >= 0 ? 0.6 : 0;
  if (!row) return tell(event, '');
  const layer = Number(row.dataset.layer);
  if (at < 0) return tell(event, row.getAttribute('aria-label') || '');
  hair.style.left = event.clientX - $('plot').getBoundingClientRect().left + 'px';
  tell(event, (layer < 0 ? 'all layers' : 'layer ' + layer) + ', token ' + whole(at) + ': …' +
    data.tokens.slice(Math.max(0, at - 6), at + 7).join('').replace(/\s+/g, ' ') + '…');
};
$('plot').onmouseleave = event => { $('hair').style.opacity = 0; tell(event, ''); };
$('plot').onkeydown = event => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  choose(Math.max(-1, Math.min(L - 1, state.layer + step)), state.head);
  (state.layer < 0 ? $('all') : $('layers').children[state.layer]).focus();
};
$('only').onclick = event => {
  const on = $('document').classList.toggle('only');
  event.target.setAttribute('aria-pressed', on);
};
$('document').onmousemove = event => {
  const i = Number(event.target.dataset.i ?? -1);
  tell(event, i < 0 ? '' : 'token ' + whole(i) + ': kept in ' + state.found[i] + ' of ' + whole(state.rows) + ' rows' +
    (i >= n - window_of() ? ' (window, always kept)' : ''));
};
$('document').onmouseleave = event => tell(event, '');
addEventListener('resize', () => { layers(); choose(state.layer, state.head); ticks(); view(); });
addEventListener('scroll', () => requestAnimationFrame(view), { passive: true });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', strips);
const asked = new URLSearchParams(location.hash.slice(1));
const number = (name, least, most) => {
  const value = parseInt(asked.get(name));
  return value >= least && value < most ? value : least;
};
state.layer = number('layer', -1, L); state.head = number('head', -1, K);
ticks(); take(number('cell', 0, data.cells.length));
if (asked.has('token')) reveal(number('token', 0, n));
view();
"""

BODY = """
<header><div><h1>{title}</h1>
<p>{tokens} tokens, {layers} layers of {heads} KV heads</p></div>
<label><select id="cell" aria-label="policy and budget"></select></label>
<div class="figures"><span>kept <b id="share"></b></span>
<span><b id="mean"></b> tokens a layer and head</span></div></header>
<main>
<section id="map"><div class="heads"><span></span><span>where in the text each layer kept tokens</span>
<span id="marks"></span><span></span></div>
<div id="plot"><button class="row" id="all" data-layer="-1" aria-pressed="true"><span>all</span><canvas></canvas>
<span class="note">share of the rows that kept a token</span><span></span></button>
<div id="layers"></div><div id="view"></div><div id="hair"></div></div>
<div class="scale"><span></span><span class="ticks" id="ticks"></span>
<span class="unit">position in tokens</span><span></span></div>
<div class="tools"><span id="shown"></span><span id="heads"></span>
<span>in no row <i class="ramp" id="ramp"></i> in every row</span><span class="key">window</span>
<button id="only" aria-pressed="false">fade what is gone</button></div></section>
<section id="text"><div id="document"></div></section>
</main>
<div id="tip" role="status"></div>
"""


def is_inspection_page(path: Path) -> bool:
    """Whether a file is empty, or a page of this kind by its first characters."""
    begin = document(TITLE, "", "").partition(TITLE)[0] + TITLE
    try:
        with path.open("rb") as file:
            data = file.read(len(begin))
    except OSError:
        return False
    return not data or data == begin.encode()


def inspection_page(title: str, data: dict[str, Any]) -> str:
    """The whole page. data: tokens, control, layers, heads and cells, as `inspection.py` makes them.

    The part of the address behind # chooses what is shown: `#cell=1&layer=12&head=0&token=4096`.
    """
    body = BODY.format(
        title=html.escape(title),
        tokens=f"{len(data['tokens']):,}",
        layers=data["layers"],
        heads=data["heads"],
    )
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    data_block = f'<script type="application/json" id="data">{text}</script>'
    return document(title, STYLE, body + data_block, SCRIPT)
