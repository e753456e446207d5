// Asks for the page again and moves what changed into the page that is shown. So open records stay
// open, and marked text stays marked. All text comes from the server, escaped; times are the
// node's, not this machine's.
'use strict';
(() => {
  const every = 2000, patience = 5000;
  const live = document.getElementById('live'), stale = document.getElementById('stale'), say = document.getElementById('say');
  const at = (id, from = document) => from.getElementById(id);
  let timer = 0, asking = false;

  function attributes(old, fresh) {
    for (const { name } of [...old.attributes]) {
      // Only the reader opens and closes records.
      if (!fresh.hasAttribute(name) && name !== 'open') old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
  }

  // follow makes old equal to fresh with as few changes as possible. Elements with the same id are
  // the same thing.
  function follow(old, fresh) {
    if (old.isEqualNode(fresh)) return;
    if (old.nodeType === Node.TEXT_NODE) { old.data = fresh.data; return; }
    attributes(old, fresh);
    const wanted = new Set([...fresh.children].map((e) => e.id));
    const named = new Map();
    for (const e of [...old.children]) {
      if (e.id && wanted.has(e.id)) named.set(e.id, e); else if (e.id) e.remove();
    }
    let next = old.firstChild;
    for (const want of [...fresh.childNodes]) {
      let same = want.id ? named.get(want.id) : next;
      // Elements without an id are cheap to replace. A moved element would lose its focus.
      while (want.id && same && next && next !== same && !next.id) { const gone = next; next = next.nextSibling; gone.remove(); }
      if (same && (same.nodeType !== want.nodeType || same.nodeName !== want.nodeName || (same.id || '') !== (want.id || ''))) same = null;
      if (!same) { old.insertBefore(want, next); continue; }
      if (same === next) next = next.nextSibling; else old.insertBefore(same, next);
      follow(same, want);
    }
    while (next) { const gone = next; next = next.nextSibling; gone.remove(); }
  }

  function show(fresh) {
    const before = at('verdict').textContent;
    for (const old of document.querySelectorAll('[data-live]')) follow(old, at(old.id, fresh));
    document.title = fresh.title;
    at('icon').setAttribute('href', at('icon', fresh).getAttribute('href'));
    const now = at('verdict').textContent;
    if (now !== before) say.textContent = now;
    stale.hidden = true;
    document.body.classList.remove('stale');
  }

  function silent() {
    if (document.body.classList.contains('stale')) return;
    document.body.classList.add('stale');
    stale.textContent = `canaryd does not answer. What is shown here is ${at('asof').textContent}.`;
    stale.hidden = false;
    document.title = `? ${document.title}`;
  }

  async function refresh() {
    if (asking) return;
    clearTimeout(timer);
    asking = true;
    try {
      const answer = await fetch(location.pathname, { cache: 'no-store', signal: AbortSignal.timeout(patience) });
      const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const build = fresh.documentElement.dataset.build;
      if (!answer.ok || !build) throw new Error('not this page');
      if (build !== document.documentElement.dataset.build) { location.reload(); return; } // canaryd was upgraded
      show(fresh);
    } catch {
      silent();
    } finally {
      asking = false;
    }
    timer = setTimeout(tick, every);
  }

  function tick() {
    if (live.ariaPressed === 'true' && !document.hidden) refresh();
  }

  live.hidden = false;
  live.addEventListener('click', () => {
    live.ariaPressed = live.ariaPressed === 'true' ? 'false' : 'true';
    live.textContent = live.ariaPressed === 'true' ? 'live' : 'not live';
    tick();
  });
  document.addEventListener('visibilitychange', tick);
  timer = setTimeout(tick, every);
})();
