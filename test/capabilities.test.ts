/**
 * The matrix of docs/capabilities.md is what the backends say of themselves, asked on real servers.
 * `HOLDFAST_WRITE_DOCS=1 vitest run test/capabilities.test.ts` writes it anew.
 */
import { readFile, writeFile } from "node:fs/promises";
import { type Capabilities, capabilityMeanings, holdfast, shownCapability } from "holdfast";
import { format } from "prettier";
import { expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";

const page = new URL("../docs/capabilities.md", import.meta.url);
const marks = { from: "<!-- generated: matrix -->", to: "<!-- end -->" } as const;

async function ask(backend: Backend): Promise<Capabilities> {
  const place = await placeFor(backend);
  const site = await backend.open(place.url);
  const hf = holdfast(site.database);
  try {
    await hf.migrate();
    return await hf.capabilities();
  } finally {
    await hf.close();
    await site.close();
    await place.drop();
  }
}

/** They depend on the machine, or are for the engine itself. */
const left = new Set<keyof Capabilities>(["engine", "flavour", "version", "client", "details"]);
const columnsPerTable = 5;

function render(all: ReadonlyMap<string, Capabilities>): string {
  const names = Object.keys(capabilityMeanings) as (keyof Capabilities)[];
  const shown = names.filter((name) => !left.has(name));
  const lines = [
    "| field | meaning |",
    "| --- | --- |",
    ...names.map((name) => `| \`${name}\` | ${capabilityMeanings[name]} |`),
    "",
  ];
  const columns = [...all];
  // Those that answer alike share a column.
  const alike = Map.groupBy(columns, ([, each]) =>
    JSON.stringify(shown.map((name) => short(shownCapability(each[name])))),
  );
  const groups = [...alike.values()];
  for (let i = 0; i < groups.length; i += columnsPerTable) {
    const part = groups.slice(i, i + columnsPerTable);
    lines.push(
      `|  | ${part.map((group) => group.map(([name]) => name).join("; ")).join(" | ")} |`,
      `| --- | ${part.map(() => "---").join(" | ")} |`,
      ...shown.map(
        (name) =>
          `| \`${name}\` | ${part.map(([first]) => (first ? short(shownCapability(first[1][name])) : "")).join(" | ")} |`,
      ),
      "",
    );
  }
  // Why not, once per reason.
  const reasons = new Map<string, string[]>();
  for (const [name, each] of columns)
    for (const field of shown) {
      const value = each[field];
      if (typeof value === "object" && "why" in value) {
        const reason = `\`${field}\`: ${value.why}`;
        reasons.set(reason, [...(reasons.get(reason) ?? []), name]);
      }
    }
  lines.push("Where it says no:", "");
  for (const [reason, where] of reasons) lines.push(`- ${where.join(", ")}: ${reason}`);
  return lines.join("\n");
}

const words: Readonly<Record<string, string>> = {
  "read committed": "RC",
  "repeatable read": "RR",
  serializable: "S",
};

function short(text: string): string {
  const parts = text.split(", ").map((part) => words[part] ?? part);
  // Eight modes would make the table unreadable.
  return parts.length > 4 ? `all ${parts.length}` : parts.join(", ");
}

test("docs/capabilities.md says what the backends say", { timeout: 300_000 }, async ({ skip }) => {
  const lacking = backends.filter((backend) => missing(backend) !== undefined);
  skip(lacking.length > 0, lacking.map(missing).join("; "));
  const all = new Map<string, Capabilities>();
  for (const backend of backends) all.set(backend.name, await ask(backend));
  const text = await readFile(page, "utf8");
  const [before, rest] = text.split(marks.from);
  const after = rest?.split(marks.to)[1];
  expect(after, `${marks.from} … ${marks.to} is missing`).toBeDefined();
  const wanted = await format(`${before}${marks.from}\n\n${render(all)}\n\n${marks.to}${after}`, {
    parser: "markdown",
    printWidth: 110,
    proseWrap: "preserve",
  });
  console.log(render(all));
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") await writeFile(page, wanted);
  else expect(text).toBe(wanted);
});
