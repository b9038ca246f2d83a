// The conversation, the document that it is about, and the server behind both.

const settings = JSON.parse($('server').textContent);
const turns = []; // { asked, answer, document, ok }
let shelved = null; // the document that questions are about
let running = null; // the AbortController of the reply that is being written
let key = sessionStorage.getItem('cake-infer key');

const sizes = [[2 ** 30, 'GiB'], [2 ** 20, 'MiB'], [2 ** 10, 'KiB'], [1, 'B']];
const number = (x, digits = 0) => x.toLocaleString('en-US', { maximumFractionDigits: digits });
function bytes(x) {
  const [unit, name] = sizes.find(([unit]) => x >= unit) || sizes.at(-1);
  return `${number(x / unit, x / unit < 10 && unit > 1 ? 1 : 0)} ${name}`;
}
const share = (part, all) => all ? `${number(100 * part / all, 1)}%` : '0%';
const sentence = text => text.charAt(0).toUpperCase() + text.slice(1);
const make = (name, className, text = '') => Object.assign(document.createElement(name), { className, textContent: text });

// -- the server ---------------------------------------------------------------------------------------------------

function askKey() {
  return new Promise(resolve => {
    $('key').value = '';
    $('ask').returnValue = '';
    $('ask').onclose = () => resolve($('ask').returnValue === 'ok' ? $('key').value.trim() : '');
    $('ask').showModal();
  });
}
async function call(path, options = {}) {
  for (;;) {
    const headers = { ...(options.body ? { 'Content-Type': 'application/json' } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try { response = await fetch(path, { ...options, headers }); } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new Error('The server does not answer. Is it still running?');
    }
    if (response.ok) return response;
    if (response.status === 401 && (key = await askKey())) { sessionStorage.setItem('cake-infer key', key); continue; }
    if (response.status === 401) { sessionStorage.removeItem('cake-infer key'); key = null; }
    throw new Error(await told(response));
  }
}
async function told(response) {
  try { return (await response.json()).error.message; } catch { return `The server answered ${response.status} ${response.statusText}`; }
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      const data = line.slice(5).trim();
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
  throw new Error('The connection broke off in the middle of the reply.');
}
async function status() {
  try {
    const health = await (await fetch('/health')).json();
    const others = health.running + health.waiting - (running ? 1 : 0);
    const name = health.model.split('/').at(-1);
    $('model').replaceChildren(make('b', '', name), others > 0 ? `, ${others} other ${others > 1 ? 'requests' : 'request'}` : '');
  } catch { $('model').textContent = 'the server does not answer'; }
}

// -- settings -----------------------------------------------------------------------------------------------------

function options() {
  const budget = $('budget').value.trim(), cake = {};
  if (budget) cake.budget = /^\d+$/.test(budget) ? Number(budget) : budget;
  if ($('policy').value) cake.policy = $('policy').value;
  return cake;
}
function sampling() {
  const given = {};
  if ($('longest').value) given.max_tokens = Number($('longest').value);
  if ($('temperature').value !== '') given.temperature = Number($('temperature').value);
  return given;
}
const systemText = () => $('system').value.trim();

// -- the conversation ---------------------------------------------------------------------------------------------

function body(text) {
  const common = { stream: true, ...sampling() };
  if (shelved) return { ...common, messages: [{ role: 'user', content: text }], cake: { document: shelved.id, stats: true } };
  const before = turns.filter(turn => turn.ok && !turn.document).flatMap(turn =>
    [{ role: 'user', content: turn.asked }, { role: 'assistant', content: turn.answer }]);
  const system = systemText() ? [{ role: 'system', content: systemText() }] : [];
  return { ...common, messages: [...system, ...before, { role: 'user', content: text }], cake: { ...options(), stats: true } };
}
function figures(stats, reason, first) {
  const parts = [], part = (label, value) => { const one = make('span', ''); one.append(label, make('b', '', value)); parts.push(one); };
  if (stats) {
    part('kept ', `${number(stats.kept_tokens)} of ${number(stats.full_tokens)}`);
    parts.at(-1).append(` tokens a layer (${share(stats.kept_tokens, stats.full_tokens)})`);
    part('', bytes(stats.kept_bytes));
    parts.at(-1).append(` of ${bytes(stats.full_bytes)}`);
    if (stats.decode_tokens_per_s) part('', `${number(stats.decode_tokens_per_s, 1)} tokens/s`);
    part('', `${number(stats.new_tokens)} tokens`);
  }
  if (first !== null) part('first after ', `${number(first / 1000, 1)} s`);
  if (reason === 'length') parts.push(make('span', '', 'ended at the longest reply'));
  if (reason === 'stopped') parts.push(make('span', '', 'stopped'));
  return parts;
}
const atEnd = () => $('log').scrollHeight - $('log').scrollTop - $('log').clientHeight < 60;
const toEnd = () => { $('log').scrollTop = $('log').scrollHeight; };

async function send(text) {
  const request = body(text), turn = { asked: text, answer: '', document: shelved && shelved.id, ok: false };
  const element = make('article', 'turn writing'), answer = make('div', 'answer'), line = make('div', 'figures');
  if (shelved) element.append(make('p', 'about', `about ${shelved.name}`));
  element.append(make('p', 'asked', text), answer, line);
  $('welcome').hidden = true;
  $('log').append(element);
  $('log').setAttribute('aria-busy', 'true');
  toEnd();
  running = new AbortController();
  buttons();
  const began = performance.now();
  let first = null, stats = null, reason = null, failure = null, scheduled = false, fresh = '';
  const node = answer.appendChild(document.createTextNode(''));
  const show = () => {
    const follow = atEnd();
    scheduled = false;
    node.appendData(fresh);
    fresh = '';
    if (follow) toEnd();
  };
  try {
    const response = await call('/v1/chat/completions', { method: 'POST', body: JSON.stringify(request), signal: running.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.cake) stats = event.cake.stats[0]; // one for each choice, and there is one
      const choice = event.choices && event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason || reason;
      const piece = choice.delta && choice.delta.content;
      if (!piece) continue;
      first ??= performance.now() - began;
      turn.answer += piece;
      fresh += piece;
      if (!scheduled) { scheduled = true; requestAnimationFrame(show); }
    }
    turn.ok = true;
  } catch (error) {
    if (error.name === 'AbortError') { reason = 'stopped'; turn.ok = turn.answer !== ''; } else {
      failure = make('p', 'failed', sentence(error.message));
      failure.setAttribute('role', 'alert');
      if (!turn.answer && !$('message').value) { $('message').value = text; grow(); }
    }
  }
  if (fresh) show();
  turns.push(turn);
  running = null;
  buttons();
  line.replaceChildren(...figures(stats, reason, first));
  answer.hidden = !turn.answer;
  if (failure) element.append(failure);
  element.classList.remove('writing');
  $('log').setAttribute('aria-busy', 'false');
  toEnd();
  status();
}
function buttons() {
  $('stop').hidden = !running;
  $('send').hidden = Boolean(running);
  $('send').disabled = !$('message').value.trim();
}
function grow() {
  $('message').style.height = 'auto';
  $('message').style.height = `${$('message').scrollHeight}px`;
  buttons();
}
function submit() {
  const text = $('message').value.trim();
  if (!text || running) return;
  $('message').value = '';
  grow();
  send(text);
}

// -- the document -------------------------------------------------------------------------------------------------

function panel(name) { for (const one of ['give', 'reading', 'kept']) $(one).hidden = one !== name; }
function trouble(message) { $('trouble').textContent = sentence(message || ''); $('trouble').hidden = !message; }
function measure() {
  const text = $('paste').value;
  $('read').disabled = !text.trim();
  $('size').textContent = text ? `${number(text.length)} characters` : '';
}
async function take(file) {
  trouble('');
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes('\0')) throw new TypeError();
    $('paste').value = text;
    $('paste').dataset.name = file.name;
    measure();
    read();
  } catch { trouble(`${file.name} is not a text in UTF-8: turn it into one first.`); }
}
async function read() {
  const text = $('paste').value, name = $('paste').dataset.name || text.trim().split('\n')[0].replace(/^#+\s*/, '').slice(0, 80);
  const stop = new AbortController(), began = performance.now();
  trouble('');
  panel('reading');
  $('reading-title').textContent = `Reading ${name}`;
  const clock = setInterval(() => { $('reading-for').textContent = `${number(text.length)} characters, ${number((performance.now() - began) / 1000)} s`; }, 200);
  $('cancel').onclick = () => stop.abort();
  $('cancel').focus();
  try {
    const request = { text, name, cake: options(), ...(systemText() ? { system: systemText() } : {}) };
    const document = await (await call('/v1/documents', { method: 'POST', body: JSON.stringify(request), signal: stop.signal })).json();
    const kept = await (await call(`/v1/documents/${document.id}/kept`, { signal: stop.signal })).json();
    open({ ...document, name }, kept);
  } catch (error) {
    panel('give');
    if (error.name !== 'AbortError') trouble(error.message);
  } finally { clearInterval(clock); }
}
function open(document, kept) {
  shelved = document;
  panel('kept');
  const rows = document.layer_lengths.flat(), all = rows.reduce((a, b) => a + b, 0), full = document.tokens * rows.length;
  $('name').textContent = document.name;
  $('name').title = document.name;
  $('summary').replaceChildren('kept ', make('b', '', `${number(document.kept_tokens)} of ${number(document.tokens)}`),
    ` tokens a layer (${share(all, full)}), `, make('b', '', bytes(document.bytes)), ` of ${bytes(document.bytes * full / all)}`);
  picture.show(kept, document.layer_lengths);
  $('message').placeholder = 'Ask about the document';
  if (!narrow.matches) $('message').focus();
}
async function remove() {
  const gone = shelved;
  shelved = null;
  picture.clear();
  $('paste').value = '';
  delete $('paste').dataset.name;
  measure();
  panel('give');
  $('message').placeholder = 'Message';
  if (gone) await call(`/v1/documents/${gone.id}`, { method: 'DELETE' }).catch(() => {});
}
const narrow = matchMedia('(max-width: 60rem)');
function side(shown) {
  document.body.classList.toggle('document', shown);
  $('to-document').setAttribute('aria-pressed', shown);
  if (shown && shelved) dispatchEvent(new Event('resize')); // the strip had no width before
}

// -- what the page does -------------------------------------------------------------------------------------------

for (const name of settings.policies || []) $('policy').add(new Option(name, name));
$('message').oninput = grow;
$('message').onkeydown = event => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
};
$('composer').onsubmit = event => { event.preventDefault(); submit(); };
$('settings').onsubmit = event => event.preventDefault();
$('stop').onclick = () => running && running.abort();
addEventListener('keydown', event => { if (event.key === 'Escape' && running) running.abort(); });
$('fresh').onclick = () => {
  if (running) running.abort();
  turns.length = 0;
  for (const turn of document.querySelectorAll('.turn')) turn.remove();
  $('welcome').hidden = false;
  side(false);
  $('message').focus();
};
$('to-settings').onclick = () => {
  $('settings').hidden = !$('settings').hidden;
  $('to-settings').setAttribute('aria-expanded', !$('settings').hidden);
};
$('to-document').onclick = () => side(!document.body.classList.contains('document'));
$('paste').oninput = () => { delete $('paste').dataset.name; measure(); };
$('read').onclick = read;
$('choose').onclick = () => $('file').click();
$('file').onchange = () => { if ($('file').files[0]) take($('file').files[0]); $('file').value = ''; };
$('remove').onclick = remove;
addEventListener('dragover', event => { event.preventDefault(); $('drop').classList.add('over'); });
addEventListener('dragleave', event => { if (!event.relatedTarget) $('drop').classList.remove('over'); });
addEventListener('drop', event => {
  event.preventDefault();
  $('drop').classList.remove('over');
  if (event.dataTransfer.files[0] && !$('give').hidden) take(event.dataTransfer.files[0]);
});
grow();
status();
setInterval(() => { if (!document.hidden) status(); }, 15000);
