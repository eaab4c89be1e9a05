// Before anything is painted: dark or light, as it was chosen last or as the system has it.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try { return localStorage.getItem("matsmerge-theme"); } catch { return null; }
  };
  const set = () => {
    document.documentElement.dataset.theme = kept() ?? (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  };
  system.addEventListener("change", set);
  window.chooseTheme = (name) => {
    try { localStorage.setItem("matsmerge-theme", name); } catch { /* a page without storage */ }
    document.documentElement.dataset.theme = name;
    document.dispatchEvent(new Event("theme"));
  };
  set();
})();
