"use strict";
// Only comfort lives here: without it every record is on the page, and links into the evidence still work.
(() => {
  const toolbar = document.querySelector(".toolbar");
  const search = document.getElementById("search");
  const chips = [...toolbar.querySelectorAll("input[type=checkbox]")];
  const cards = [...document.querySelectorAll("details.record")].map((card) => ({
    card,
    id: card.querySelector(".body").id,
    verdict: card.dataset.verdict,
    text: [card.dataset.case, card.querySelector("summary").textContent, card.querySelector(".headline").textContent]
      .join(" ").toLowerCase(),
  }));
  const suites = [...document.querySelectorAll(".matrix tbody")].map((body) => ({
    body,
    rows: [...body.querySelectorAll(".row")].map((row) => ({
      row,
      cells: [...row.querySelectorAll("a.tile")].map((link) => ({ link, id: link.hash.slice(1) })),
    })),
  }));

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = new Set(chips.filter((chip) => chip.checked).map((chip) => chip.value));
    const shown = new Set();
    for (const { card, id, verdict, text } of cards) {
      const matches = (!wanted.size || wanted.has(verdict)) && words.every((word) => text.includes(word));
      card.hidden = !matches;
      if (matches) shown.add(id);
    }
    for (const { body, rows } of suites) {
      for (const { row, cells } of rows) {
        for (const { link, id } of cells) link.classList.toggle("dim", !shown.has(id));
        row.hidden = !cells.some(({ id }) => shown.has(id));
      }
      body.hidden = rows.every(({ row }) => row.hidden);
    }
    document.getElementById("shown").textContent = `${shown.size} of ${cards.length} records`;
    document.querySelector(".none").hidden = shown.size > 0;
  }

  function reveal() {
    const target = document.getElementById(location.hash.slice(1));
    const card = target && target.closest("details.record");
    if (!card) return;
    if (card.hidden) {
      search.value = "";
      for (const chip of chips) chip.checked = false;
      filter();
    }
    card.open = true;
    target.scrollIntoView();
  }

  toolbar.hidden = false;
  toolbar.addEventListener("submit", (event) => event.preventDefault());
  toolbar.addEventListener("input", filter);
  window.addEventListener("hashchange", reveal);
  if (navigator.clipboard) {
    for (const button of document.querySelectorAll(".copy")) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.previousElementSibling.textContent);
        button.textContent = "copied";
      });
    }
  }
  filter();
  reveal();
})();
