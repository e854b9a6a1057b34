"use strict";
// Rows are made when they are seen, and evidence is unpacked when a record is opened: 20,000 records open at once.
(async () => {
  const ROW = 34, ENTRY = 58; // pixels: as in page.css
  const $ = (id) => document.getElementById(id);

  async function unpack(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(plain).json();
  }

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element) element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const data = await unpack($("index").textContent);
  const pieces = document.querySelectorAll(".piece");
  const rows = []; // of the matrix: a suite's heading, or a case with the records of each column
  for (const suite of data.suites) {
    rows.push({ suite: suite.name });
    for (const [label, id] of suite.cases) rows.push({ label, id, cells: data.columns.map(() => []) });
  }
  const cases = rows.filter((row) => row.cells);
  const records = data.records.map(([row, column, verdict, headline, took, words, cause], number) => {
    const record = { number, case: cases[row], column, verdict, headline, took, words, cause };
    cases[row].cells[column].push(record);
    return record;
  });

  const verdictOf = (record) => data.verdicts[record.verdict];
  const columnOf = (record) => data.columns[record.column];

  // `before` is the verdict in the run to compare with: "" where that has no such record, undefined without such a run.
  const isChanged = (record) => record.before !== undefined && record.before !== verdictOf(record)[0];
  const verdictText = (record) => verdictOf(record)[0] + (isChanged(record) ? ` (was ${record.before || "not there"})` : "");

  function tile(record) {
    const [, sign, tone] = verdictOf(record);
    return make("span", { className: `tile ${tone} ${isChanged(record) ? "changed" : ""}`, ariaHidden: "true", textContent: sign });
  }

  // ---- rows that are made when they are seen ----
  class Rows {
    constructor(scroller, parent, tag, height, draw) {
      Object.assign(this, { scroller, parent, tag, height, draw, items: [], first: -1, last: -1 });
      scroller.addEventListener("scroll", () => this.update());
      new ResizeObserver(() => this.update()).observe(scroller);
    }
    show(items) {
      this.items = items;
      this.first = this.last = -1;
      this.update();
    }
    update() {
      const around = 12;
      const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.height) - around);
      const last = Math.min(this.items.length, first + Math.ceil(this.scroller.clientHeight / this.height) + 2 * around);
      if (first === this.first && last === this.last) return;
      const focused = this.parent.contains(document.activeElement) && document.activeElement.dataset.place;
      [this.first, this.last] = [first, last];
      const space = (count) => make(this.tag, { ariaHidden: "true", className: "space", style: `height:${count * this.height}px` });
      const shown = this.items.slice(first, last).map((item, offset) => this.draw(item, first + offset));
      this.parent.replaceChildren(space(first), ...shown, space(this.items.length - last));
      if (focused) this.parent.querySelector(`[data-place="${focused}"]`)?.focus({ preventScroll: true });
    }
    reveal(index) {
      const top = index * this.height, view = this.scroller;
      if (top < view.scrollTop + 2 * this.height) view.scrollTop = Math.max(0, top - 2 * this.height);
      else if (top + 2 * this.height > view.scrollTop + view.clientHeight) view.scrollTop = top + 3 * this.height - view.clientHeight;
      this.update();
    }
  }

  // One tab stop for a whole region; arrows move within it.
  function roam(scroller, view, move) {
    let current = null;
    const link = (place) => scroller.querySelector(`[data-place="${place}"]`);
    view.mark = (element, place) => {
      element.dataset.place = place;
      element.tabIndex = current === null || current === place ? 0 : -1;
      if (current === null) current = place;
    };
    view.forget = () => { current = null; };
    scroller.addEventListener("focusin", (event) => {
      if (!event.target.dataset.place) return;
      link(current)?.setAttribute("tabindex", "-1");
      current = event.target.dataset.place;
      event.target.tabIndex = 0;
    });
    scroller.addEventListener("keydown", (event) => {
      const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
      const found = steps && event.target.dataset.place && move(event.target.dataset.place, ...steps);
      if (!steps || !event.target.dataset.place) return;
      event.preventDefault();
      if (!found) return;
      view.reveal(Number(found.split(".")[0]));
      link(found)?.focus({ preventScroll: true });
    });
  }

  // ---- the matrix ----
  const shown = new Set();
  const matrix = new Rows($("cells"), document.querySelector(".matrix tbody"), "tr", ROW, (row, index) => {
    if (row.suite !== undefined) {
      const heading = make("th", { scope: "rowgroup", colSpan: data.columns.length + 1 }, make("span", { textContent: row.suite }));
      return make("tr", { className: "suite" }, heading);
    }
    const name = make("th", { scope: "row", className: "case", title: row.id, textContent: row.label });
    const cells = row.cells.map((found, column) => make("td", {}, ...found.map((record, place) => {
      const verdict = verdictText(record), [engine, world] = columnOf(record);
      const link = make("a", {
        href: address({ record: record.number }), className: shown.has(record) ? "" : "dim",
        ariaLabel: `${verdict}, ${engine} in ${world}, ${row.label}`,
        title: `${verdict} ${engine} in ${world}: ${data.texts[record.headline]}`,
      }, tile(record));
      matrix.mark(link, `${index}.${column}.${place}`);
      return link;
    })));
    return make("tr", { className: "row" }, name, ...cells);
  });
  roam($("cells"), matrix, (place, down, right) => {
    let [row, column, nth] = place.split(".").map(Number);
    const has = (r, c) => matrix.items[r]?.cells?.[c]?.length;
    for (row += down, column += right; matrix.items[row] && column >= 0 && column < data.columns.length; row += down, column += right) {
      if (has(row, column)) return `${row}.${column}.${Math.min(nth, has(row, column) - 1)}`;
    }
    return "";
  });

  function head() {
    const engines = make("tr", {}, make("th", { scope: "col", rowSpan: 2, className: "case", textContent: "case" }));
    const worlds = make("tr");
    data.columns.forEach(([engine, world], column) => {
      if (data.columns[column - 1]?.[0] !== engine) {
        const count = data.columns.filter(([other]) => other === engine).length;
        engines.append(make("th", { scope: "colgroup", colSpan: count, textContent: engine }));
      }
      worlds.append(make("th", { scope: "col", textContent: world }));
    });
    document.querySelector(".matrix thead").append(engines, worlds);
  }

  // ---- the list ----
  const list = new Rows($("list"), $("list").firstElementChild, "li", ENTRY, (record, index) => {
    const verdict = verdictText(record), [engine, world] = columnOf(record);
    const link = make("a", { href: address({ record: record.number }) },
      tile(record),
      make("span", { className: "verdict", textContent: verdict }),
      make("span", { className: "name", textContent: record.case.label }),
      make("span", { className: "where", textContent: `${engine} ${world} · ${data.texts[record.took]}` }),
      make("span", { className: "why", textContent: data.texts[record.headline] }));
    list.mark(link, `${index}`);
    return make("li", {}, link);
  });
  roam($("list"), list, (place, down) => {
    const next = Number(place) + down;
    return down && list.items[next] ? `${next}` : "";
  });

  // ---- what is shown, and its address ----
  const chips = [...document.querySelectorAll(".chips input")];
  const only = { cause: null, column: null }; // the numbers of the only ones to show
  const asked = () => new URLSearchParams(location.hash.slice(1));

  function address(changes) {
    const query = asked();
    for (const [name, value] of Object.entries(changes)) {
      if (value === "" || value === null) query.delete(name);
      else query.set(name, value);
    }
    return `#${query}`;
  }

  function finds(words) {
    const columns = data.columns.map((names) => names.join(" ").toLowerCase());
    const texts = data.texts.map((text) => text.toLowerCase());
    const verdicts = data.verdicts.map(([name]) => name.toLowerCase());
    return (record) => words.every((word) =>
      record.case.id.toLowerCase().includes(word) || columns[record.column].includes(word)
      || verdicts[record.verdict].includes(word) || texts[record.headline].includes(word)
      || texts[record.words].includes(word));
  }

  function filter() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = new Set(chips.filter((chip) => chip.checked).map((chip) => chip.value));
    const isFound = finds(words);
    shown.clear();
    for (const record of records) {
      const isAsked = Object.entries(only).every(([name, number]) => number === null || record[name] === Number(number));
      if ($("changed").checked && !isChanged(record)) continue;
      if (isAsked && (!wanted.size || wanted.has(verdictOf(record)[0])) && isFound(record)) shown.add(record);
    }
    const kept = [];
    let heading = null;
    for (const row of rows) {
      if (row.suite !== undefined) heading = row;
      else if (row.cells.some((cell) => cell.some((record) => shown.has(record)))) {
        if (heading) kept.push(heading);
        heading = null;
        kept.push(row);
      }
    }
    matrix.forget();
    list.forget();
    matrix.show(kept);
    list.show([...shown]);
    $("shown").textContent = `${shown.size} of ${records.length} records`;
    document.querySelector(".none").hidden = shown.size > 0;
  }

  // ---- another run to compare with ----
  async function compare(file) {
    const page = new DOMParser().parseFromString(await file.text(), "text/html");
    const other = await unpack(page.getElementById("index").textContent);
    const ids = other.suites.flatMap((suite) => suite.cases.map(([, id]) => id));
    const key = (id, column) => JSON.stringify([id, ...column]);
    const before = new Map(other.records.map(([row, column, verdict]) =>
      [key(ids[row], other.columns[column]), other.verdicts[verdict][0]]));
    const here = new Set();
    for (const record of records) {
      const its = key(record.case.id, columnOf(record));
      record.before = before.get(its) ?? "";
      here.add(its);
    }
    const missing = [...before.keys()].filter((its) => !here.has(its)).length;
    return missing ? `; ${missing} records of the other run are not in this one` : "";
  }

  $("other").addEventListener("change", async () => {
    const [file] = $("other").files, chip = $("changed").parentElement;
    for (const record of records) record.before = undefined;
    $("changed").checked = false;
    $("compared").textContent = "";
    if (file) {
      try {
        const missing = await compare(file);
        $("compared").textContent = `${file.name}: ${records.filter(isChanged).length} of ${records.length} records changed${missing}`;
      } catch {
        $("compared").textContent = `${file.name}: expected the report.html of a run, as Shardproof writes it`;
      }
    }
    chip.hidden = !records.some(isChanged);
    chip.querySelector("b").textContent = records.filter(isChanged).length;
    filter();
  });

  // ---- one record ----
  const dialog = document.querySelector("dialog");
  let last = [-1, []]; // the piece unpacked last

  async function evidence(number) {
    const piece = Math.floor(number / data.perPiece);
    if (last[0] !== piece) last = [piece, await unpack(pieces[piece].textContent)];
    return last[1][number % data.perPiece];
  }

  async function open(number) {
    const record = records[number];
    if (!record) return dialog.close();
    const verdict = verdictText(record), [engine, world] = columnOf(record);
    $("record-title").replaceChildren(tile(record), ` ${verdict} ${record.case.label} `, make("span", { className: "world", textContent: `${engine} ${world}` }));
    $("record").innerHTML = await evidence(number); // escaped when it was written
    for (const button of navigator.clipboard ? $("record").querySelectorAll(".copy") : []) {
      button.hidden = false;
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.previousElementSibling.textContent);
        button.textContent = "copied";
      });
    }
    const around = [...shown];
    const place = around.indexOf(record);
    for (const [id, step] of [["previous", -1], ["next", 1]]) {
      const other = place < 0 ? undefined : around[place + step];
      $(id).disabled = !other;
      $(id).onclick = () => { location.hash = address({ record: other.number }); };
    }
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  }

  function follow() {
    const query = asked();
    const wanted = new Set((query.get("v") || "").split(" ").filter(Boolean));
    const isOther = (query.get("q") || "") !== $("search").value || chips.some((chip) => chip.checked !== wanted.has(chip.value));
    if (isOther || Object.keys(only).some((name) => query.get(name) !== only[name])) {
      for (const name of Object.keys(only)) only[name] = query.get(name);
      for (const link of document.querySelectorAll(".heat a")) link.ariaCurrent = link.hash === `#column=${only.column}`;
      $("search").value = query.get("q") || "";
      for (const chip of chips) chip.checked = wanted.has(chip.value);
      filter();
    }
    if (query.has("record")) open(Number(query.get("record")));
    else if (dialog.open) dialog.close();
  }

  $("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { if (asked().has("record")) location.hash = address({ record: null }); });
  const toolbar = document.querySelector(".toolbar");
  toolbar.hidden = false;
  toolbar.addEventListener("submit", (event) => event.preventDefault());
  toolbar.addEventListener("input", () => {
    const wanted = chips.filter((chip) => chip.checked).map((chip) => chip.value).join(" ");
    only.cause = null;
    history.replaceState(null, "", address({ q: $("search").value, v: wanted, cause: null }));
    filter();
  });
  // Links of the page keep what is shown.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#record="], a[href^="#cause="], a[href^="#column="]');
    if (!link) return;
    event.preventDefault();
    const [name, value] = link.hash.slice(1).split("=");
    if (name === "record") { location.hash = address({ record: value }); return; }
    const isAgain = only[name] === value; // a second click shows all again
    location.hash = address({ cause: null, column: null, q: "", v: "", [name]: isAgain ? null : value });
    if (!isAgain) $("matrix").scrollIntoView();
  });
  window.addEventListener("hashchange", follow);
  head();
  filter();
  follow();
})();
