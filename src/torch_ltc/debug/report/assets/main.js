// The page from above to below, its navigation and its theme.

const sections = [
  makeFindings(),
  makeTimeline(),
  makePrograms(),
  ...makeFunctions(),
  makeDifference(),
  makeCompiles(),
  makeSyncs(),
  makeFallbacks(),
  makeMemory(),
  makeSettings(),
  makeMetrics(),
];
const page = document.getElementById("page");
page.replaceChildren(makeHeading(), makeFigures(), ...sections);
document.getElementById("foot").textContent =
  "Written by torch_ltc. This file is complete: it loads nothing and sends nothing.";

const links = sections.map((made) => {
  const title = made.querySelector("h2").textContent;
  return element(
    "a",
    {
      href: `#${made.id}`,
      onclick: (event) => {
        event.preventDefault();
        goTo(made);
      },
    },
    title,
  );
});
document.getElementById("navigation").append(...links);
const watch = new IntersectionObserver(
  (entries) => {
    const entered = entries.find((entry) => entry.isIntersecting);
    if (!entered) return;
    for (const link of links) {
      if (link.getAttribute("href") === `#${entered.target.id}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  },
  { rootMargin: "-15% 0px -75% 0px" },
);
for (const made of sections) watch.observe(made);

const themes = window.reportTheme;
const themeButton = document.getElementById("theme");
function showTheme() {
  themeButton.textContent = themes.current() === "dark" ? "Light" : "Dark";
  redraw();
}
themeButton.addEventListener("click", () => {
  const theme = themes.current() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  themes.remember(theme);
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
themeButton.textContent = themes.current() === "dark" ? "Light" : "Dark";

// Paper is white: the charts are drawn for it, and as before afterwards.
let beforePrint;
addEventListener("beforeprint", () => {
  beforePrint = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  redraw();
});
addEventListener("afterprint", () => {
  if (beforePrint) document.documentElement.dataset.theme = beforePrint;
  else delete document.documentElement.dataset.theme;
  redraw();
});
