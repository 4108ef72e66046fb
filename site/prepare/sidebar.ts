/** What is listed beside the pages. Folders list what is in them, so a new page is found by itself. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import type { DefaultTheme } from "vitepress";
import { titleOf } from "./markdown.ts";
import { filesIn, read, root } from "./places.ts";

type Item = DefaultTheme.SidebarItem;

/** By task. What is in none of these is listed as "More". */
const groups: Record<string, string[]> = {
  Start: ["quick-start", "choose", "demo"],
  Tasks: [
    "quota",
    "credits",
    "quota-http",
    "stock",
    "queue",
    "schedules",
    "leaders",
    "once",
    "rows",
    "versions",
    "keys",
    "leases",
    "shards",
  ],
  "Find races": ["races", "anomalies", "hazards", "history", "testing", "certify"],
  "In production": [
    "guarantees",
    "capabilities",
    "schema",
    "doctor",
    "observability",
    "metrics",
    "audit",
    "high-availability",
    "benchmarks",
  ],
};
/** Listed with other things. */
const elsewhere = [
  "errors",
  "command",
  "command-answers",
  "command-bench",
  "command-exec",
  "command-locks",
  "command-patterns",
];
const inside = ["architecture", "mutants"];

const doc = (path: string): Item => ({
  text: titleOf(read(path)),
  link: `/${path.slice("docs/".length, -".md".length)}`,
});
const named = (names: string[]): Item[] =>
  names
    .map((name) => `docs/${name}.md`)
    .filter((path) => existsSync(join(root, path)))
    .map(doc);
const folder = (name: string): Item[] =>
  existsSync(join(root, "docs", name)) ? filesIn(`docs/${name}`, ".md").map(doc) : [];

interface Made {
  readonly commands: readonly string[];
  readonly codes: readonly string[];
  readonly modules: readonly { path: string; title: string }[];
  readonly examples: readonly string[];
}

const back: Item = { text: "← Guides", link: "/quick-start" };

/** Guides, engines and clients beside each other; what there are many of (codes, verbs, …), beside their own pages. */
export function sidebars({ commands, codes, modules, examples }: Made): DefaultTheme.SidebarMulti {
  const listed = new Set([...Object.values(groups).flat(), ...elsewhere, ...inside]);
  const more = filesIn("docs", ".md")
    .filter((path) => path.split("/").length === 2)
    .filter((path) => !listed.has(path.slice("docs/".length, -".md".length)))
    .map(doc);
  const group = (text: string, items: Item[], collapsed = true): Item[] =>
    items.length > 0 ? [{ text, collapsed, items }] : [];
  const errors: Item[] = [
    back,
    {
      text: "Errors",
      link: "/errors",
      items: codes.map((code) => ({ text: code, link: `/errors/${code}` })),
    },
  ];
  const verbs: Item[] = [
    back,
    { text: "The command", items: named(elsewhere.filter((name) => name.startsWith("command"))) },
    { text: "Verbs", items: commands.map((name) => ({ text: name, link: `/commands/${name}` })) },
  ];
  const decisions: Item[] = [
    back,
    { text: "Inside", items: insidePages() },
    { text: "Decisions", items: folder("decisions") },
  ];
  return {
    "/errors": errors,
    "/command": verbs,
    "/api/": [
      back,
      {
        text: "API",
        link: "/api/",
        items: modules
          .filter(({ path }) => path !== "index.md" && !path.includes("/namespaces/"))
          .map(({ path, title }) => ({
            text: title,
            link: `/api/${path.slice(0, -".md".length).replace(/(^|\/)index$/, "$1")}`,
          })),
      },
    ],
    "/examples/": [
      back,
      {
        text: "Examples",
        link: "/examples/",
        items: examples.map((name) => ({ text: name, link: `/examples/${name}` })),
      },
    ],
    "/decisions/": decisions,
    "/architecture": decisions,
    "/mutants": decisions,
    "/contributing": decisions,
    "/changelog": decisions,
    "/": [
      ...Object.entries(groups).map(([text, names]) => ({ text, items: named(names) })),
      ...group("More", more, false),
      ...group("Frameworks", folder("frameworks")),
      ...group("Coming from", folder("coming-from")),
      ...group("Clients", folder("adapters")),
      ...group("Engines", folder("engines")),
      {
        text: "Reference",
        items: [
          { text: "API", link: "/api/" },
          { text: "Errors", link: "/errors" },
          { text: "The command", link: "/command" },
          { text: "Examples", link: "/examples/" },
          { text: "Inside", link: "/architecture" },
        ],
      },
    ],
  };
}

const insidePages = (): Item[] => [
  ...named(inside),
  { text: "Contributing", link: "/contributing" },
  { text: "Changes", link: "/changelog" },
];
