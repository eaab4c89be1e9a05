// What the page does: draws figures in the theme's colours, lets layers be chosen, saves and copies.
"use strict";

const { figures, template, dark, series } = JSON.parse(document.getElementById("figures").textContent);
const frames = [...document.querySelectorAll("[data-figure]")];
const DASHES = ["solid", "dash", "dot", "dashdot"];

// Figures have light colours; on dark each is replaced.
const isDark = () => document.documentElement.dataset.theme === "dark";
function painted(value) {
  if (Array.isArray(value)) return value.map(painted);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, painted(part)]));
  }
  return (isDark() && typeof value === "string" && dark[value]) || value;
}

// --- drawing ---------------------------------------------------------------------------------

function draw(frame) {
  const plot = frame.querySelector(".plot");
  const figure = figures[frame.dataset.figure];
  const { data, layout } = figure.convergence ? convergence(frame, figure.convergence) : figure;
  const log = frame.querySelector(":scope > .controls > label > [data-log=x]");
  const type = log ? (log.checked ? "log" : "linear") : layout.xaxis?.type;
  const isSquare = layout.yaxis?.scaleanchor;
  const height = isSquare ? Math.min(layout.height, plot.clientWidth + 40) : layout.height;
  plot.style.height = `${height}px`; // plotly follows its frame when the window changes
  if (layout.showlegend) drawLegend(frame, data);
  const hidden = frame.hiddenGroups ?? new Set();
  frame.drawn = data.filter((trace) => !hidden.has(group(trace)));
  // What is at 0 has no place on a logarithmic axis.
  const placed = (trace) =>
    type === "log" ? { ...trace, x: trace.x.map((x) => (x > 0 ? x : null)) } : trace;
  frame.picture = {
    data: painted(frame.drawn.map(placed)),
    layout: painted({ ...layout, template, height, xaxis: { ...layout.xaxis, type } }),
  };
  return Plotly.react(
    plot, frame.picture.data, { ...frame.picture.layout, showlegend: false },
    { displayModeBar: false, responsive: true },
  );
}

// --- legend: buttons, which wrap on a phone and take the keyboard ------------------------------

const GLYPHS = {
  circle: "●", square: "■", "triangle-up": "▲", "triangle-down": "▼", diamond: "◆", cross: "✚",
  star: "★", x: "✖", "diamond-open": "◇", "square-open": "□", "circle-open": "○", "line-ns": "|",
};
const group = (trace) => trace.legendgroup ?? trace.name;

function drawLegend(frame, data) {
  const legend = frame.querySelector(".legend");
  const hidden = (frame.hiddenGroups ??= new Set());
  const rank = (trace) => trace.legendrank ?? 0;
  const named = data.filter((trace) => trace.showlegend !== false);
  legend.replaceChildren(...named.toSorted((a, b) => rank(a) - rank(b)).map((trace) => {
    const button = document.createElement("button");
    const mark = document.createElement("span");
    const drawnAsLine = trace.type === "contour" || trace.mode === "lines";
    mark.className = drawnAsLine ? `stroke ${trace.line.dash ?? "solid"}` : "glyph";
    mark.textContent = drawnAsLine ? "" : GLYPHS[trace.marker.symbol ?? (trace.type === "bar" ? "square" : "circle")];
    mark.style.color = painted(trace.colorscale?.[0][1] ?? trace.marker?.color ?? trace.line?.color);
    button.type = "button";
    button.append(mark, unescaped(trace.name));
    button.setAttribute("aria-pressed", !hidden.has(group(trace)));
    button.addEventListener("click", () => {
      if (!hidden.delete(group(trace))) hidden.add(group(trace));
      draw(frame);
      [...legend.children].find((other) => other.textContent === button.textContent)?.focus();
    });
    return button;
  }));
}

// --- layers ----------------------------------------------------------------------------------

const chosenMerge = (frame, merges) =>
  merges[Math.max(0, frame.querySelector("[data-merge]").selectedIndex)];
const boxes = (frame) => [...frame.querySelectorAll("[data-choices] input")];
const last = (values) => values.at(-1) ?? Infinity;
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function convergence(frame, merges) {
  const merge = chosenMerge(frame, merges);
  const quantity = frame.querySelector("input[type=radio]:checked").value;
  const picked = boxes(frame).filter((box) => box.checked).map((box) => merge.layers[box.value]);
  const few = picked.length <= 10;
  if (!few) frame.querySelector(".legend").replaceChildren();
  frame.querySelector("[data-count]").textContent = `(${picked.length} of ${merge.layers.length})`;
  const type = (axis) => (frame.querySelector(`[data-log=${axis}]`).checked ? "log" : "linear");
  const data = picked.map((layer, i) => ({
    type: "scatter",
    mode: layer.x.length > 1 ? "lines" : "markers",
    name: plain(layer.name),
    x: layer.x,
    y: layer[quantity],
    opacity: few ? 1 : 0.6,
    line: {
      width: few ? 2 : 1.2,
      color: series[i % series.length],
      dash: DASHES[Math.floor(i / series.length) % DASHES.length],
    },
    hovertemplate: "%{x} iterations: %{y:.2e}<extra>" + plain(layer.name) + "</extra>",
  }));
  const layout = {
    height: 400,
    showlegend: few && picked.length > 0,
    legend: { orientation: "v", x: 1, xanchor: "right", y: 1, yanchor: "top" },
    xaxis: { title: { text: "iterations" }, type: type("x") },
    yaxis: {
      title: { text: quantity === "residual" ? "relative residual" : "objective, of the start's" },
      type: type("y"), ...(type("y") === "log" ? powers(data) : {}),
    },
  };
  return { data, layout };
}

// An axis of powers of ten, not too many; they are drawn larger than other numbers.
function powers(data) {
  const values = data.flatMap((trace) => trace.y).filter((value) => value > 0).map(Math.log10);
  const decades = values.reduce((a, b) => Math.max(a, b), -Infinity) - values.reduce((a, b) => Math.min(a, b), Infinity);
  return { exponentformat: "power", tickfont: { size: 10.5 }, dtick: Math.max(1, Math.ceil(decades / 7)) };
}

function listLayers(frame, merges) {
  const list = frame.querySelector("[data-choices]");
  list.replaceChildren(...chosenMerge(frame, merges).layers.map((layer, i) => {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", value: i });
    label.append(box, ` ${layer.name}`);
    return label;
  }));
  pick(frame, merges, "worst");
}

function pick(frame, merges, which) {
  const { layers } = chosenMerge(frame, merges);
  const shown = boxes(frame).filter((box) => !box.parentElement.hidden);
  const order = shown.toSorted((a, b) => last(layers[b.value].residual) - last(layers[a.value].residual));
  const wanted = { worst: order.slice(0, 5), best: order.slice(-5), all: shown, none: [] }[which];
  for (const box of boxes(frame)) box.checked = wanted.includes(box);
  draw(frame);
}

function filter(frame) {
  const part = frame.querySelector("[data-filter]").value.toLowerCase();
  for (const box of boxes(frame)) {
    box.parentElement.hidden = !box.parentElement.textContent.toLowerCase().includes(part);
  }
}

// --- saving and copying ----------------------------------------------------------------------

const say = (text) => { document.getElementById("said").textContent = text; };

function unescaped(value) {
  if (typeof value !== "string") return value;
  const text = value.replace(/<\/?b>|<br>/g, " ").replaceAll("&lt;", "<").replaceAll("&gt;", ">");
  return text.replaceAll("&amp;", "&").trim();
}

function csv(data) {
  // A cell that a spreadsheet would take for a formula is kept as text.
  const cell = (value) => {
    const text = String(unescaped(value) ?? "");
    const safe = typeof value === "string" && /^[=+@\t\r-]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const rows = [["series", "label", "x", "y", "value", "error"]];
  for (const trace of data) {
    if (trace.z) {
      (trace.customdata ?? trace.z).forEach((line, i) => line.forEach((value, j) => {
        const text = Array.isArray(trace.text) ? trace.text[i][j] : "";
        rows.push([trace.name, text, trace.x[j], trace.y[i], value, ""]);
      }));
    } else {
      trace.x.forEach((x, i) => {
        const error = (trace.error_y ?? trace.error_x)?.array?.[i] ?? "";
        rows.push([trace.name, trace.text?.[i] ?? "", x, trace.y[i], "", error]);
      });
    }
  }
  const used = rows[0].map((_, j) => j).filter((j) => rows.slice(1).some((row) => row[j] !== ""));
  return rows.map((row) => used.map((j) => cell(row[j])).join(",")).join("\n") + "\n";
}

function save(frame, kind) {
  const plot = frame.querySelector(".plot");
  const filename = frame.dataset.name.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  if (kind !== "csv") {
    const size = { width: Math.max(900, plot.clientWidth), height: plot.layout.height };
    Plotly.downloadImage(frame.picture, { format: kind, filename, scale: kind === "png" ? 2 : 1, ...size });
  } else {
    const url = URL.createObjectURL(new Blob([csv(frame.drawn)], { type: "text/csv" }));
    Object.assign(document.createElement("a"), { href: url, download: `${filename}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }
  say(`Saved ${filename}.${kind}`);
}

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch { // a page from a file may not be let near the clipboard
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

// --- wiring ----------------------------------------------------------------------------------

for (const frame of frames) {
  const merges = figures[frame.dataset.figure].convergence;
  frame.addEventListener("click", ({ target }) => {
    if (target.dataset.export) save(frame, target.dataset.export);
    if (target.dataset.quick) pick(frame, merges, target.dataset.quick);
  });
  frame.querySelector(".controls")?.addEventListener("change", ({ target }) => {
    if (merges) frame.hiddenGroups?.clear(); // other layers, other names
    if ("merge" in target.dataset) {
      listLayers(frame, merges);
      filter(frame);
    } else if (!("filter" in target.dataset)) draw(frame);
  });
  frame.querySelector("[data-filter]")?.addEventListener("input", () => filter(frame));
}

// A figure is drawn when it comes near the screen, so that a long page opens at once.
const begun = new Set();

function begin(frame) {
  if (begun.has(frame)) return;
  begun.add(frame);
  const merges = figures[frame.dataset.figure].convergence;
  if (merges) listLayers(frame, merges);
  else draw(frame);
}

const near = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => begin(target)),
  { rootMargin: "500px" },
);
for (const frame of frames) {
  const height = figures[frame.dataset.figure].layout?.height ?? 400;
  frame.querySelector(".plot").style.minHeight = `${Math.min(height, 400)}px`;
  near.observe(frame);
}
addEventListener("beforeprint", () => frames.forEach(begin));

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button));
}
const toggle = document.getElementById("theme");
const nameToggle = () => { toggle.textContent = isDark() ? "Light theme" : "Dark theme"; };
toggle.addEventListener("click", () => chooseTheme(isDark() ? "light" : "dark"));
document.addEventListener("theme", () => { nameToggle(); begun.forEach(draw); });
nameToggle();
