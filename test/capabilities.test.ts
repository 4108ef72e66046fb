/**
 * The tables of docs/capabilities.md and README.md are what the backends say of themselves, asked on real servers.
 * `HOLDFAST_WRITE_DOCS=1 vitest run test/capabilities.test.ts` writes them anew.
 */
import { readFile, writeFile } from "node:fs/promises";
import { type Capabilities, capabilityMeanings, holdfast, shownCapability } from "holdfast";
import { format } from "prettier";
import { expect, test } from "vitest";
import { type Backend, backends } from "./backends.ts";
import { missing, placeFor } from "./harness/places.ts";

const page = new URL("../docs/capabilities.md", import.meta.url);
const readme = new URL("../README.md", import.meta.url);

/** Puts what was generated between its marks, or compares it with what is there. */
async function hold(file: URL, mark: string, generated: string): Promise<void> {
  const text = await readFile(file, "utf8");
  const [before, rest] = text.split(`<!-- generated: ${mark} -->`);
  const [, ...after] = rest?.split("<!-- end -->") ?? [];
  expect(after.length, `<!-- generated: ${mark} --> … <!-- end --> is missing`).toBeGreaterThan(0);
  const wanted = await format(
    `${before}<!-- generated: ${mark} -->\n\n${generated}\n\n<!-- end -->${after.join("<!-- end -->")}`,
    { parser: "markdown", printWidth: 110, proseWrap: "preserve" },
  );
  if (process.env["HOLDFAST_WRITE_DOCS"] === "1") await writeFile(file, wanted);
  else expect(text).toBe(wanted);
}

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
  console.log(render(all));
  await hold(page, "matrix", render(all));
});

/** The client by which each engine is asked: of the others the matrix tells. */
const engines = {
  PostgreSQL: "pg",
  MySQL: "mysql2 on MySQL",
  MariaDB: "mysql2 on MariaDB",
  SQLite: "better-sqlite3",
  libSQL: "libsql",
  DuckDB: "duckdb",
} as const;

/** What people look for, by the capability that it needs. */
const features: readonly (readonly [feature: string, needs: keyof Capabilities])[] = [
  ["`hf.transaction({ lock })`, `hf.lock`, `hf.tryLock`", "transactionLocks"],
  ["`hf.join`: in your own transaction", "joinedLocks"],
  ["`hf.hold`: longer than a transaction", "sessionLocks"],
  ["`shared(key)`", "sharedLocks"],
  ["`tx.rows`, `tx.row`", "rowLocks"],
  ["`tx.table`", "tableLocks"],
  ["`hf.lease`, `hf.semaphore`, `leader`", "leases"],
  ["`versioned`", "versions"],
  ["`once`", "once"],
  ["`quota`, and its HTTP middleware", "quotas"],
  ["`stock`", "stock"],
  ["`queue`", "queues"],
  ["`schedule`", "schedules"],
  ["`audited`", "audit"],
  ["`hf.inspect`, `holdfast locks`", "inspect"],
  ["a deadline that the server keeps", "serverDeadline"],
  ["a lost COMMIT is looked up", "commitOutcome"],
];

/** As the README has it: what is to be had in the same places is one line, or as many as can be read. */
function inFewLines(
  rows: readonly (readonly [feature: string, answers: string])[],
): (readonly [string, string])[] {
  return [...Map.groupBy(rows, ([, answers]) => answers)].flatMap(([answers, group]) => {
    const lines: string[] = [];
    for (const [feature] of group) {
      const line = lines.at(-1);
      if (line !== undefined && line.length + feature.length < 100)
        lines[lines.length - 1] = `${line}; ${feature}`;
      else lines.push(feature);
    }
    return lines.map((line) => [line, answers] as const);
  });
}

test(
  "README.md and docs/capabilities.md have the features of each engine",
  { timeout: 120_000 },
  async ({ skip }) => {
    const names = Object.keys(engines) as (keyof typeof engines)[];
    const asked = names.map((name) => backends.find((backend) => backend.name === engines[name]) as Backend);
    const lacking = asked.filter((backend) => missing(backend) !== undefined);
    skip(lacking.length > 0, lacking.map(missing).join("; "));
    const told = await Promise.all(asked.map(ask));
    const cell = (value: Capabilities[keyof Capabilities]) =>
      shownCapability(value) === "no" ? "no" : "yes";
    const tableOf = (rows: readonly (readonly [feature: string, answers: string])[]) =>
      [
        `|  | ${names.join(" | ")} |`,
        `| --- | ${names.map(() => "---").join(" | ")} |`,
        ...rows.map(([feature, answers]) => `| ${feature} | ${answers} |`),
      ].join("\n");
    const rows = features.map(
      ([feature, needs]) => [feature, told.map((each) => cell(each[needs])).join(" | ")] as const,
    );
    console.log(tableOf(rows));
    await hold(page, "engines", tableOf(rows));
    await hold(readme, "engines", tableOf(inFewLines(rows)));
  },
);
