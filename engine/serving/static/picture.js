// What was kept of a document: its tokens, each shaded by how many rows have it, and how much each layer kept.

const picture = (() => {
  const PLAIN = 20000; // tokens that get an element each; beyond it neighbours of one shade share one
  const STEPS = 10;
  let data = null, layer = -1, counts = null, rows = 1, elements = [], starts = [];

  const sum = list => list.reduce((a, b) => a + b, 0);
  const whole = x => Math.round(x).toLocaleString('en-US');
  const heat = () => getComputedStyle(document.documentElement).getPropertyValue('--heat').trim().split(/\s+/).map(Number);

  // bits of a layer: its heads one behind the other, a bit for each token, lowest first
  function decode(text) { return Uint8Array.from(atob(text), c => c.charCodeAt(0)); }
  function count() {
    const n = data.tokens.length, stride = Math.ceil(n / 8), found = new Uint16Array(n);
    const layers = layer < 0 ? data.bits : [data.bits[layer]];
    let heads = 0;
    for (const one of layers) for (let start = 0; start < one.length; start += stride, heads++)
      for (let i = 0; i < n; i++) found[i] += (one[start + (i >> 3)] >> (i & 7)) & 1;
    counts = found; rows = heads;
  }
  const shade = i => counts[i] ? Math.max(1, Math.round(STEPS * counts[i] / rows)) : 0;

  function draw() {
    const n = data.tokens.length, part = document.createDocumentFragment(), special = new Set(data.special);
    elements = []; starts = [];
    for (let i = 0; i < n;) {
      const element = document.createElement('span'), step = shade(i), start = i;
      let text = '';
      do text += data.tokens[i++]; while (n > PLAIN && i < n && shade(i) === step && !special.has(i) && !special.has(i - 1));
      element.textContent = text;
      element.className = 'h' + step + (special.has(start) ? ' special' : '');
      elements.push(element); starts.push(start); part.append(element);
    }
    $('text').replaceChildren(part);
  }
  function colour() {
    if (data.tokens.length > PLAIN) return draw();
    const special = new Set(data.special);
    elements.forEach((element, i) => { element.className = 'h' + shade(i) + (special.has(i) ? ' special' : ''); });
  }
  function where() {
    const canvas = $('where'), n = data.tokens.length, context = canvas.getContext('2d');
    const width = canvas.width = Math.max(60, Math.round(canvas.clientWidth * devicePixelRatio));
    const image = context.createImageData(width, canvas.height = 1), ink = heat();
    for (let x = 0; x < width; x++) {
      const from = Math.floor(x * n / width), to = Math.max(from + 1, Math.floor((x + 1) * n / width));
      let total = 0;
      for (let i = from; i < to && i < n; i++) total += counts[i];
      const share = total / ((to - from) * rows);
      image.data.set([...ink, share ? Math.round(30 + 225 * Math.sqrt(share)) : 0], 4 * x);
    }
    context.putImageData(image, 0, 0);
  }
  function tell() {
    const n = data.tokens.length;
    const kept = sum(counts) / rows, never = counts.reduce((a, x) => a + (x === 0), 0);
    $('chosen').textContent = layer < 0 ? `${data.bits.length} layers: ${whole(kept)} tokens a row on average`
      : `layer ${layer + 1} of ${data.bits.length}: ${whole(kept)} of ${whole(n)} tokens`;
    $('never').textContent = layer < 0 ? `${whole(never)} tokens in no row` : `${whole(never)} tokens dropped here`;
    $('all').hidden = layer < 0;
    [...$('layers').children].forEach((bar, i) => bar.setAttribute('aria-pressed', i === layer));
  }
  function choose(next) {
    layer = next;
    count(); tell();
    colour(); where();
  }
  function bars(lengths) {
    const means = lengths.map(heads => sum(heads) / heads.length), top = Math.max(...means, 1);
    $('layers').replaceChildren(...means.map((mean, i) => {
      const button = document.createElement('button'), bar = document.createElement('i');
      bar.style.setProperty('height', `${100 * mean / top}%`);
      button.title = `layer ${i + 1}: ${whole(mean)} tokens kept`;
      button.setAttribute('aria-label', button.title);
      button.setAttribute('aria-pressed', 'false');
      button.tabIndex = i ? -1 : 0;
      button.onclick = () => data && choose(layer === i ? -1 : i);
      button.append(bar);
      return button;
    }));
  }
  function moveBetweenBars(event) {
    const bars = [...$('layers').children], at = bars.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: bars.length - 1 }[event.key];
    if (at < 0 || next === undefined || !bars[next]) return;
    bars[at].tabIndex = -1;
    bars[next].tabIndex = 0;
    bars[next].focus();
    event.preventDefault();
  }
  function elementOf(token) {
    let low = 0, high = starts.length - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (starts[middle] <= token) low = middle; else high = middle - 1; }
    return elements[low];
  }
  function reveal(event) {
    if (!data) return;
    const box = $('where').getBoundingClientRect();
    const element = elementOf(Math.floor(data.tokens.length * (event.clientX - box.left) / box.width));
    element.scrollIntoView({ block: 'center' });
    element.classList.add('found');
    setTimeout(() => element.classList.remove('found'), 1500);
  }
  function tip(event) {
    const at = event.target.parentNode === $('text') && data && data.tokens.length <= PLAIN ? elements.indexOf(event.target) : -1;
    $('tip').style.opacity = at < 0 ? 0 : 1;
    if (at < 0) return;
    $('tip').textContent = `token ${whole(at + 1)}: in ${whole(counts[at])} of ${whole(rows)} rows`;
    $('tip').style.left = `${Math.min(event.clientX + 12, innerWidth - 210)}px`;
    $('tip').style.top = `${Math.min(event.clientY + 16, innerHeight - 36)}px`;
  }

  $('layers').addEventListener('keydown', moveBetweenBars);
  $('all').onclick = () => choose(-1);
  $('where').onclick = reveal;
  $('text').onmousemove = tip;
  $('text').onmouseleave = () => { $('tip').style.opacity = 0; };
  addEventListener('resize', () => data && where());
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => data && where());

  return {
    // kept: what /v1/documents/{id}/kept answers; lengths: [layer][head] kept tokens
    show(kept, lengths) {
      data = { ...kept, bits: kept.bits.map(decode) };
      layer = -1;
      bars(lengths);
      count(); tell(); draw(); where();
    },
    clear() {
      data = null; elements = []; starts = [];
      $('text').replaceChildren(); $('layers').replaceChildren();
    },
  };
})();
