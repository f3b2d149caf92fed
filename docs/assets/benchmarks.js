"use strict";

// The page of benchmarks: reads the result files that index.json names and draws bars of what was chosen.
(() => {
  const PASSES = ["fwd", "bwd", "step"];
  const DTYPES = [["bfloat16", /bfloat16|bf16/], ["float16", /float16|fp16|half/], ["float32", /float32|fp32/]];

  function dtypeOf(name) {
    const found = DTYPES.find(([, words]) => words.test(name));
    return found ? found[0] : "other";
  }

  function rowsOf(file) {
    return file.cases.map((entry) => ({
      device: file.device.name,
      family: entry.family,
      dtype: dtypeOf(entry.case),
      pass: PASSES.find((pass) => entry.case.endsWith(` ${pass}`)) || "whole",
      name: entry.case,
      floor: entry.floor_microseconds,
      when: file.date.slice(0, 10),
      versions: `PyTorch ${file.versions.torch}, Triton ${file.versions.triton}`,
      times: entry.implementations.filter((one) => one.status === "ok" && one.microseconds),
    }));
  }

  function element(tag, attributes = {}, ...children) {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  }

  function microseconds(value) {
    return value < 1000 ? `${value.toPrecision(3)} µs` : `${(value / 1000).toPrecision(3)} ms`;
  }

  function figure(row) {
    const longest = Math.max(...row.times.map((one) => one.microseconds), row.floor || 0);
    const bars = row.times.map((one) => {
      const track = element("span", { className: "track" });
      const bar = element("div", { className: "bar" });
      bar.style.width = `${(100 * one.microseconds) / longest}%`;
      track.append(bar);
      if (row.floor) {
        const floor = element("div", { className: "floor", title: `floor ${microseconds(row.floor)}` });
        floor.style.left = `${(100 * row.floor) / longest}%`;
        track.append(floor);
      }
      const name = one.implementation === "ours" ? "apex (this)" : one.implementation;
      const kind = one.implementation === "ours" ? "row ours" : "row";
      return element("div", { className: kind }, element("span", {}, name), track, element("span", {}, microseconds(one.microseconds)));
    });
    const text = `${row.name} · ${row.versions} · ${row.when}`;
    return element("figure", {}, element("figcaption", {}, text), ...bars);
  }

  function choice(name, values, current, change) {
    const select = element("select", { name });
    values.forEach((value) => select.append(element("option", { value, selected: value === current }, value)));
    select.addEventListener("change", () => change(name, select.value));
    return element("label", {}, name, select);
  }

  function draw(place, rows) {
    const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    let left = rows;
    const form = element("form");
    const change = (name, value) => {
      location.hash = new URLSearchParams({ ...chosen, [name]: value });
    };
    for (const name of ["device", "family", "dtype", "pass"]) {
      const values = [...new Set(left.map((row) => row[name]))].sort();
      const current = values.includes(chosen[name]) ? chosen[name] : values[0];
      form.append(choice(name, values, current, change));
      left = left.filter((row) => row[name] === current);
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    place.replaceChildren(form, ...left.map(figure));
  }

  async function start() {
    const place = document.getElementById("benchmark-results");
    if (!place) return;
    const index = new URL(place.dataset.index, location.href);
    try {
      const names = await (await fetch(index)).json();
      const files = await Promise.all(names.map(async (name) => (await fetch(new URL(name, index))).json()));
      const rows = files.flatMap(rowsOf).filter((row) => row.times.length);
      const show = () => draw(place, rows);
      addEventListener("hashchange", show);
      show();
    } catch (error) {
      place.replaceChildren(element("p", { className: "note" }, `The results cannot be read: ${error}. They need a web server: make docs-serve.`));
    }
  }

  start();
})();
