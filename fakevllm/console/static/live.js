// Load the changing part of a page again when the console sends an event.
// The connection is closed while the page is hidden, because browsers open at most six connections to one host.
(() => {
  "use strict";
  const EVENTS = ["ledger", "clock"];
  const live = document.querySelector("#live[hx-get]");
  if (!live) return;
  const stale = document.querySelector("#stale");
  const timers = {};
  const sentAt = {};
  let source = null;

  // Pass an event to the page, at most once in `data-interval-s` seconds. An event that comes too early is passed later, and is not lost.
  function pass(name) {
    if (timers[name]) return;
    const interval = 1000 * Number(live.dataset.intervalS || 0);
    const wait = Math.max(0, (sentAt[name] ?? -Infinity) + interval - Date.now());
    timers[name] = setTimeout(() => {
      timers[name] = null;
      sentAt[name] = Date.now();
      htmx.trigger(document.body, name);
    }, wait);
  }

  function open() {
    if (source || document.hidden) return;
    source = new EventSource("/events");
    for (const name of EVENTS) source.addEventListener(name, () => pass(name));
    // The browser tries again by itself, but not after a refusal: the login has ended, or too many pages are open.
    source.addEventListener("open", () => { stale.hidden = true; });
    source.addEventListener("error", () => { stale.hidden = false; });
  }

  function close() {
    if (source) source.close();
    source = null;
  }

  // The first event of a stream is `ledger`, so a page that is shown again is loaded again.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
