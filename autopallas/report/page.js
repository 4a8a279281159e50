"use strict";
(() => {
  const bar = document.querySelector(".filters");
  if (!bar) return;
  const items = [...document.querySelectorAll("details.item")];
  const search = bar.querySelector("input");
  const nothing = document.querySelector(".nothing-matches");
  const chosen = { kind: "", op: "" };

  function apply() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const item of items) {
      const text = item.textContent.toLowerCase();
      const visible = (!chosen.kind || item.dataset.kind === chosen.kind)
        && (!chosen.op || item.dataset.op === chosen.op)
        && words.every((word) => text.includes(word));
      item.hidden = !visible;
      shown += visible;
    }
    for (const heading of document.querySelectorAll("h3[data-kind]")) {
      const section = heading.parentElement;
      heading.hidden = ![...section.querySelectorAll(`details.item[data-kind="${heading.dataset.kind}"]`)]
        .some((item) => !item.hidden);
    }
    nothing.hidden = shown > 0;
  }

  for (const button of bar.querySelectorAll("button[data-filter]")) {
    button.addEventListener("click", () => {
      const group = button.dataset.filter;
      chosen[group] = chosen[group] === button.dataset.value ? "" : button.dataset.value;
      for (const other of bar.querySelectorAll(`button[data-filter="${group}"]`))
        other.setAttribute("aria-pressed", String(other.dataset.value === chosen[group]));
      apply();
    });
  }
  const fold = bar.querySelector("button.fold");
  fold.addEventListener("click", () => {
    const visible = items.filter((item) => !item.hidden);
    const open = !visible.every((item) => item.open);
    for (const item of visible) item.open = open;
    label();
  });
  function label() {
    const visible = items.filter((item) => !item.hidden);
    fold.textContent = visible.length && visible.every((item) => item.open) ? "Fold all" : "Unfold all";
  }
  for (const item of items) item.addEventListener("toggle", label);
  search.addEventListener("input", apply);
  bar.hidden = false;
  apply();
  label();
})();
