import { readFileSync } from "node:fs";
import { defineConfig } from "vitepress";
import { slug } from "./slug.ts";

export default defineConfig({
  lang: "en",
  title: "Holdfast",
  description:
    "Makes code that checks, then writes, exact under concurrency, on the database you already run.",
  srcDir: "pages",
  lastUpdated: false,
  markdown: {
    anchor: { slugify: slug },
    languageAlias: { prisma: "graphql" },
    theme: { light: "github-light-high-contrast", dark: "github-dark-default" },
  },
  themeConfig: {
    nav: [
      { text: "Quick start", link: "/quick-start" },
      { text: "Choose", link: "/choose" },
      { text: "API", link: "/api/" },
      { text: "Examples", link: "/examples/" },
    ],
    // Written before VitePress starts; read, not imported, so that it is as new as the pages.
    sidebar: JSON.parse(readFileSync(new URL("../pages/sidebars.json", import.meta.url), "utf8")),
    outline: [2, 3],
    search: {
      provider: "local",
      options: {
        _render(text, env, md) {
          // Colours are not searched for, and take most of the time.
          md.options.highlight = null;
          return md.render(searched(text, env.relativePath), env);
        },
      },
    },
    externalLinkIcon: true,
  },
});

/** Sources and history are found from the pages that link to them; the parts of a function, with it. */
function searched(text: string, path: string): string {
  if (/^(examples|decisions|changelog|contributing)\b/.test(path)) return "";
  return path.startsWith("api/") ? text.replaceAll(/^#{4,} /gm, "") : text;
}
