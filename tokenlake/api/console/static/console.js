// Three small things: pages that say so stay fresh, the token strip answers to mouse and keys, and keys save clicks.
"use strict";

const EVERY_MS = 3000;

function keepFresh() {
  const live = document.querySelector("[data-live]");
  const state = document.querySelector("[data-state]");
  if (!live) return;
  const again = (ms) => setTimeout(refresh, ms);
  async function refresh() {
    if (document.hidden) return again(EVERY_MS);
    const start = performance.now();
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (answer.status === 401) return location.reload();
      if (!answer.ok) throw new Error(String(answer.status));
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-live]");
      const busy = live.contains(document.activeElement) || !getSelection().isCollapsed;
      if (fresh && !busy && fresh.innerHTML !== live.innerHTML) live.replaceChildren(...fresh.childNodes);
      state.classList.remove("lost");
      state.textContent = "live";
    } catch {
      state.classList.add("lost");
      state.textContent = "the service does not answer";
    }
    // A large lake is not asked all the time.
    again(Math.max(EVERY_MS, 10 * (performance.now() - start)));
  }
  again(EVERY_MS);
}

function readTokens() {
  const strip = document.querySelector("[data-strip]");
  const readout = document.querySelector("[data-readout]");
  if (!strip) return;
  const tokens = [...strip.querySelectorAll(".t")];
  let at = -1;
  function show(token) {
    readout.textContent = `${token.textContent}   ${token.title}`;
  }
  function go(to, scroll) {
    if (to < 0 || to >= tokens.length) return;
    if (at >= 0) tokens[at].classList.remove("at");
    at = to;
    tokens[at].classList.add("at");
    if (scroll) tokens[at].scrollIntoView({ block: "nearest" });
    show(tokens[at]);
  }
  strip.addEventListener("mouseover", (event) => event.target.classList.contains("t") && show(event.target));
  strip.addEventListener("click", (event) => go(tokens.indexOf(event.target), false));
  strip.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to, true);
  });
}

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      const search = document.getElementById("q");
      if (!search) return;
      event.preventDefault();
      search.focus();
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.matches("[data-submit]")) {
      event.target.form.requestSubmit();
    }
  });
}

keepFresh();
readTokens();
listenToKeys();
