import type { Theme } from "vitepress";
// Without its web fonts: the reader's own are there at once.
import DefaultTheme from "vitepress/theme-without-fonts";
import { Chooser } from "./chooser.ts";
import { Schedule } from "./schedule.ts";
import { rememberTabs } from "./tabs.ts";
// oxlint-disable-next-line import/no-unassigned-import -- that is how a theme has a style.
import "./style.css";

export default {
  extends: DefaultTheme,
  setup: rememberTabs,
  enhanceApp({ app }) {
    app.component("Chooser", Chooser);
    app.component("Schedule", Schedule);
  },
} satisfies Theme;
