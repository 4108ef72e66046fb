import { existsSync } from "node:fs";
import { writeFile } from "node:fs/promises";
import { parseArgs } from "node:util";
import { tableOfFigures } from "../../packages/cli/src/bench/table.ts";
import type { Report, SuiteOptions } from "./report.ts";

interface Suite {
  readonly about: string;
  readonly load: () => Promise<{ readonly run: (options: SuiteOptions) => Promise<Report> }>;
}

const suites: Readonly<Record<string, Suite>> = {
  locks: {
    about: "a locked check-then-write, next to the textbook's",
    load: () => import("./suites/locks.ts"),
  },
  rows: {
    about: "row locks, next to the same by hand; and versions, next to row locks",
    load: () => import("./suites/rows.ts"),
  },
  engines: {
    about: "a locked check-then-write on MySQL, MariaDB and SQLite, next to each one's textbook",
    load: () => import("./suites/engines.ts"),
  },
  patterns: {
    about:
      "quota, stock and queue on MySQL, MariaDB and SQLite, next to each one's textbook (also: patterns sqlite)",
    load: () => import("./suites/patterns.ts"),
  },
  quota: {
    about: "one unit of a quota, next to the textbook and to rate-limiter-flexible on PostgreSQL and Redis",
    load: () => import("./suites/quota.ts"),
  },
  shards: {
    about: "one unit of a quota over two PostgreSQL servers, next to one: processor time of the busiest",
    load: () => import("./suites/shards.ts"),
  },
  stock: {
    about: "orders on one hot SKU and over 1,000, next to the textbook and to a conditional UPDATE",
    load: () => import("./suites/stock.ts"),
  },
  queue: {
    about: "jobs that do nothing, next to graphile-worker, pg-boss and BullMQ on PostgreSQL",
    load: () => import("./suites/queue.ts"),
  },
  watch: {
    about: "what it costs to be watched for hazards, slow sections and the order of locks",
    load: () => import("./suites/watch.ts"),
  },
  explore: {
    about: "how long it takes to try all orders of a check-then-write",
    load: () => import("./suites/explore.ts"),
  },
  orms: {
    about: "a locked check-then-write inside each ORM's own transaction, next to the same by hand",
    async load() {
      // Prisma's client is generated code, and not part of a checkout.
      if (!existsSync(new URL("../../examples/prisma/generated", import.meta.url)))
        await import("../../scripts/generate.ts");
      return import("./suites/orms.ts");
    },
  },
};

const columns = {
  cell: "cell",
  contestant: "contestant",
  opsPerSecond: "op/s",
  p50Ms: "p50 ms",
  p99Ms: "p99 ms",
};

// As in production: hazards are counted and not warned of, and no place is noted.
process.env["NODE_ENV"] ??= "production";

const { values, positionals } = parse();
const [name, ...only] = positionals;
const suite = name === undefined ? undefined : suites[name];

if (name === undefined || suite === undefined) {
  if (name !== undefined) console.error(`There is no suite ${name}.`);
  console.log("npm run bench -- <suite> [--json] [--seconds n] [--svg file]\n");
  for (const [each, { about }] of Object.entries(suites)) console.log(`  ${each.padEnd(12)}${about}`);
  process.exitCode = name === undefined ? 0 : 1;
} else {
  const seconds = Number(values.seconds);
  if (!(seconds > 0)) throw new Error(`--seconds must be a number above 0, not ${values.seconds}`);
  const { run } = await suite.load();
  const report = await run({ seconds, only, note: (text) => console.error(text) });
  if (values.svg !== undefined) await writeFile(values.svg, await (await import("./chart.ts")).chart(report));
  if (values.json) console.log(JSON.stringify(report));
  else print(report);
}

function parse() {
  return parseArgs({
    allowPositionals: true,
    options: {
      json: { type: "boolean", default: false },
      seconds: { type: "string", default: "6" },
      svg: { type: "string" },
    },
  });
}

function print({ machine, rows, ratios, notes }: Report): void {
  const { cpus, model, memoryGb, node, postgres } = machine;
  console.log(`${cpus} × ${model}, ${memoryGb} GB, Node ${node}, PostgreSQL ${postgres}`);
  // A suite may add columns of its own; lists are for machines only.
  const details = Object.keys(rows[0] ?? {}).filter(
    (key) => !(key in columns) && typeof rows[0]?.[key] !== "object",
  );
  console.log(
    tableOfFigures(
      [...Object.values(columns), ...details],
      rows.map((row) => [...Object.keys(columns), ...details].map((key) => row[key] ?? "")),
    ),
  );
  for (const text of notes ?? []) console.log(text);
  console.log("\nRatios of op/s, ours over the other (above 1: ours is faster):");
  console.log(
    tableOfFigures(
      ["ratio", ""],
      Object.entries(ratios).map(([key, value]) => [key, value]),
    ),
  );
}
