// Load the changing part of a page again when the console sends an event.
// The connection is closed while the page is hidden, because browsers open at most six connections to one host.
(() => {
  "use strict";
  const EVENTS = ["ledger", "clock"];
  if (!document.querySelector("#live[hx-get]")) return;
  let source = null;

  function open() {
    if (source || document.hidden) return;
    source = new EventSource("/events");
    for (const name of EVENTS) {
      source.addEventListener(name, () => htmx.trigger(document.body, name));
    }
  }

  function close() {
    if (source) source.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return close();
    open();
    htmx.trigger(document.body, "ledger");
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
