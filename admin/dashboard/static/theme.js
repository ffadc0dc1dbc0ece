// Before anything is shown, so that a page does not flash in the other theme.
const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
