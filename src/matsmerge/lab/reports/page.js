// What the page does: shows the table that is chosen, saves figures, copies code, keeps the theme.
"use strict";

const say = (text) => { document.getElementById("said").textContent = text; };

for (const choose of document.querySelectorAll("[data-choose]")) {
  const tables = choose.closest(".choice").querySelectorAll("[data-choice]");
  const show = () => tables.forEach((table, i) => { table.hidden = i !== choose.selectedIndex; });
  choose.addEventListener("change", show);
  show(); // a browser may remember what was chosen before
}

for (const box of document.querySelectorAll("[data-errors]")) {
  const show = () => box.closest(".table").classList.toggle("with-errors", box.checked);
  box.addEventListener("change", show);
  show();
}

// --- saving and copying ----------------------------------------------------------------------

for (const button of document.querySelectorAll("[data-save]")) {
  button.addEventListener("click", () => {
    const figure = button.closest("figure");
    const style = getComputedStyle(document.documentElement);
    // Alone, a figure has no page to take its colours from.
    const text = figure.querySelector(".wide svg").outerHTML
      .replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim())
      .replace("<svg", `<svg style="background:${style.getPropertyValue("--surface").trim()}" font-family="sans-serif"`);
    const name = `${figure.dataset.name.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.svg`;
    const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
    say(`Saved ${name}`);
  });
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

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy(button));
}

// --- theme -----------------------------------------------------------------------------------

const toggle = document.getElementById("theme");
const isDark = () => document.documentElement.dataset.theme === "dark";
const nameToggle = () => { toggle.textContent = isDark() ? "Light theme" : "Dark theme"; };
toggle.addEventListener("click", () => chooseTheme(isDark() ? "light" : "dark"));
document.addEventListener("theme", nameToggle);
nameToggle();
