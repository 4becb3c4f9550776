// Before anything is drawn, so that a remembered theme does not flash the other one first.
window.reportTheme = {
  key: "torch_ltc.report.theme",
  // A page in a frame, or with storage switched off, may not remember: then the system's choice stands.
  remembered() {
    try {
      return localStorage.getItem(this.key);
    } catch {
      return null;
    }
  },
  remember(theme) {
    try {
      localStorage.setItem(this.key, theme);
    } catch {
      /* the theme holds until the page is closed */
    }
  },
  current() {
    return (
      document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")
    );
  },
};
{
  const theme = window.reportTheme.remembered();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
