/** Examples are programs that people run first: they must run. */
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { beforeEach, describe, expect, test } from "vitest";
import { holdfast, sql } from "holdfast";
import { type Backend, backends } from "./backends.ts";
import { bundled } from "./harness/bundled.ts";
import { missing, placeFor } from "./harness/places.ts";

const root = fileURLToPath(new URL("../", import.meta.url));

async function run(
  file: string,
  args: string[],
  env: NodeJS.ProcessEnv = {},
): Promise<{ code: number | null; output: string }> {
  const child = spawn(process.execPath, [...bundled, file, ...args], {
    cwd: root,
    env: { ...process.env, ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  let output = "";
  for (const stream of [child.stdout, child.stderr])
    stream.on("data", (chunk: Buffer) => (output += chunk.toString()));
  const code = await new Promise<number | null>((resolve) => child.once("close", resolve));
  return { code, output };
}

/** The same app on each of them. */
const orms = ["prisma", "drizzle", "knex", "kysely", "sequelize", "typeorm", "mikro-orm"];

const saved = (text: string) => ({ saved: text });
const paid = { status: 200, body: { payment: 1 } };
const sales = { sold: 24, refused: 36, left: 1 };

/** What each of them says of its tables, after its callers have collided. */
const results: Readonly<Record<string, unknown>> = {
  quota: { granted: 10, refused: 90, usedBytes: 1000 },
  inventory: ["pessimistic", "conditional", "versioned"].map((way) => ({ way, ...sales })),
  // 150 transfers in either direction; of each 75 that are limited, 50 get through.
  transfer: {
    done: 250,
    refused: 50,
    limited: { A: 50, B: 50 },
    balances: { A: 1000, B: 1000 },
    retries: 0,
  },
  document: {
    first: saved("Once upon"),
    second: { busy: "Ada is editing it" },
    again: saved("Once upon a time"),
    body: "Once upon a time",
  },
  provision: { requests: 40, created: 20, orgs: 20, owners: 20, members: 20 },
  "fraud-check": {
    asked: [100, 9000],
    status: "rejected",
    amount: 9000,
    charged: 0,
    underLock: expect.stringMatching(/^timer at index\.ts:\d+$/),
  },
  webhook: {
    together: Array.from({ length: 5 }, () => paid),
    later: paid,
    forged: { status: 422, body: "HF_ONCE_CONFLICT" },
    credits: 100,
    payments: 1,
  },
  export: {
    batches: 10,
    second: "skipped",
    exported: 1000,
    twice: 0,
    late: { signalled: true, write: "HF_STALE_FENCE" },
  },
  metrics: {
    saved: 10,
    busy: 10,
    scraped: {
      'holdfast_transactions_total{service="documents",outcome="rollback",lock="document"}': 10,
      'holdfast_transactions_total{service="documents",outcome="commit",lock="document"}': 10,
      'holdfast_lock_wait_seconds_count{service="documents",kind="transaction",outcome="granted",lock="document"}': 10,
      'holdfast_lock_wait_seconds_count{service="documents",kind="transaction",outcome="busy",lock="document"}': 10,
      'holdfast_locks_refused_total{service="documents",kind="transaction",reason="busy",lock="document"}': 10,
      'holdfast_lock_hold_seconds_count{service="documents",kind="transaction",lock="document"}': 10,
    },
    ids: 0,
  },
  // 120 jobs, some of which were with a worker that was killed.
  "recipe-queue": { jobs: 120, effects: 120, twice: 0, left: 0, swept: true },
  // 30 orders want the last 20 caps; two processes are told of each.
  "recipe-stock": {
    sold: 20,
    before: 20,
    short: 20,
    left: { CAP: 0, MUG: 60 },
    moved: { CAP: -20, MUG: -40 },
  },
  nightly: { ran: 1, skipped: 4, runs: 1 },
  "migrate-once": { instances: 5, ran: 1, followed: 4, wentOn: 5 },
  "nightly-report": { instances: 5, begun: 2, reports: 1, state: "done" },
  // 24 of 30, each sent three times at once and again if it failed, have a row and are paid.
  credits: {
    retries: { answered: 24, failed: 6, rows: 24, unpaid: 0, held: 0 },
    credits: { answered: 10, refused: 15, left: expect.objectContaining({ credits: 0, held: 0 }) },
    month: { answered: 7, refused: 13 },
    burst: { refused: true, tooMany: 0 },
    ledgers: "add up",
  },
  // 24 confirmations and 10 receipts, one of which has nowhere to go.
  emails: {
    orders: 24,
    declined: 6,
    clicks: 30,
    receipts: 10,
    sent: 33,
    written: 33,
    twice: 0,
    putOff: 6,
    failed: ["Error: 550 no such user: nobody@shop.example"],
  },
  // The request is in `pay`; the order of locks is told by who comes second.
  hazards: {
    careful: { hazards: [], slow: [] },
    naive: {
      hazards: [
        expect.stringMatching(/^fetch at index\.ts:\d+$/),
        expect.stringMatching(/^order at index\.ts:\d+$/),
      ],
      slow: [expect.stringMatching(/^checkout:1 at index\.ts:\d+: fetch$/)],
    },
  },
  race: { locked: { ok: true }, naive: { ok: false, switches: 1 } },
  // 30 want the last 20 caps; 25 sales of the last 10 shirts, each told three times.
  shop: {
    checkout: { sold: 20, refused: 10 },
    marketplace: { told: 30, refused: 45, counted: 10 },
    left: { CAP: 0, MUG: 960, SHIRT: 0 },
    channels: { ML_SALE: -10, ORDER: -60 },
    books: "add up",
    textbook: { sold: 20, refused: 10, left: 0 },
    naive: expect.stringMatching(/^fetch at naive\.ts:\d+$/),
  },
  ...Object.fromEntries(orms.map((orm) => [orm, { granted: 37, refused: 63, rows: 37 }])),
};

/** What those that show both ways do under a lock, where they do it wrongly: its kind, and the line that it is on. */
const naive: Readonly<Record<string, readonly (readonly [kind: string, line: string])[]>> = {
  "fraud-check": [["timer", "await sleep(50);"]],
  // The order is told at the statement of whoever comes second.
  hazards: [
    ["fetch", "fetch(`http://127.0.0.1:${port}/pay/${id}`)"],
    ["order", "UPDATE ${orders} SET status = 'new' WHERE sku"],
  ],
  shop: [["fetch", "await fetch(`${bank}?charge=${id}`)"]],
};

interface Told {
  readonly event: "hazard" | "slow";
  readonly kind?: string;
  readonly place?: string;
  readonly hazards?: Readonly<Record<string, number>>;
}

/** What all processes of an example were told of, while it ran: see `test/workers/watched.ts`. */
function toldIn(file: string): Told[] {
  if (!existsSync(file)) return [];
  const lines = readFileSync(file, "utf8").trim().split("\n");
  return lines.map((line) => JSON.parse(line) as Told);
}

/** `file:line:column`, as the text that is there. */
function lineAt(place: string | undefined): string {
  const [, file = "", line] = /^(.*):(\d+):\d+$/.exec(place ?? "") ?? [];
  return file.startsWith(join(root, "examples"))
    ? (readFileSync(file, "utf8").split("\n")[Number(line) - 1] ?? "")
    : "";
}

const backendOf = (name: string) => backends.find((each) => each.name === name) as Backend;

test.each(Object.entries(results))("examples/%s", (name, result) => tried(backendOf("pg"), name, result));

/** Those that take whatever DATABASE_URL names; the others are for PostgreSQL. */
const portable: Readonly<Record<string, unknown>> = {
  ...Object.fromEntries(
    [
      "recipe-queue",
      "recipe-stock",
      "credits",
      "emails",
      "nightly-report",
      // They need no more of an engine than these.
      ...(process.env["HOLDFAST_LONG"] === "1" ? ["metrics", "nightly"] : []),
    ].map((name) => [name, results[name]]),
  ),
  // Its textbook is one of PostgreSQL.
  shop: { ...(results["shop"] as object), textbook: undefined },
};

const engines = ["mysql2 on MySQL", "node:sqlite"];
if (process.env["HOLDFAST_LONG"] === "1") engines.push("mysql2 on MariaDB");

describe.each(engines.map(backendOf))("$name", (backend) => {
  const lacking = missing(backend);
  beforeEach(({ skip }) => skip(lacking !== undefined, lacking));

  test.each(Object.entries(portable))("examples/%s", (name, result) => tried(backend, name, result));
});

async function tried(backend: Backend, name: string, result: unknown): Promise<void> {
  const place = await placeFor(backend);
  const url = backend.server === "file" ? `file:${place.url}` : place.url;
  const folder = mkdtempSync(join(tmpdir(), "holdfast-example-"));
  try {
    const watched = join(folder, "told.jsonl");
    const listening = `--import=${new URL("workers/watched.ts", import.meta.url).href}`;
    const env = { DATABASE_URL: url, HOLDFAST_WATCHED: watched, NODE_OPTIONS: listening };
    const { code, output } = await run(`examples/${name}/index.ts`, ["--json"], env);
    expect(code, output).toBe(0);
    const lines = output.trim().split("\n");
    // It tells people too.
    expect(lines.length, output).toBeGreaterThan(1);
    expect(JSON.parse(lines.at(-1) ?? "")).toEqual(result);
    // What people take for a pattern does nothing under a lock that it should not.
    expect(output).not.toContain("HF_HAZARD");
    const told = toldIn(watched);
    const hazards = told.filter(({ event }) => event === "hazard");
    const wanted = naive[name] ?? [];
    expect(
      hazards.map(({ kind, place }) => [kind, lineAt(place)]),
      JSON.stringify(told),
    ).toEqual(wanted.map(([kind, line]) => [kind, expect.stringContaining(line)]));
    // How long is the machine's affair; what was waited for meanwhile is not.
    const kinds = told.flatMap(({ event, hazards: meanwhile }) =>
      event === "slow" ? Object.keys(meanwhile ?? {}) : [],
    );
    expect(kinds.filter((kind) => !wanted.some(([known]) => known === kind))).toEqual([]);
    expect(await leftovers(backend, place.url)).toEqual([]);
  } finally {
    rmSync(folder, { recursive: true, force: true });
    await place.drop();
  }
}

const catalogs: Readonly<Record<string, string>> = {
  postgres: "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'",
  file: "SELECT name FROM sqlite_schema WHERE name LIKE 'holdfast_example%'",
};
const catalog =
  "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name LIKE 'holdfast_example%'";

/** Tables of its own: those of `hf.migrate()` stay. */
async function leftovers({ server, open }: Backend, url: string): Promise<unknown[]> {
  const site = await open(url);
  const hf = holdfast(site.database);
  try {
    return await hf.transaction((tx) => tx.query(sql.raw(catalogs[server] ?? catalog)));
  } finally {
    await hf.close();
    await site.close();
  }
}

test("every example is run, and listed for people", () => {
  const folders = readdirSync(join(root, "examples"), { withFileTypes: true })
    .filter((entry) => entry.isDirectory() && entry.name !== "node_modules")
    .map(({ name }) => name);
  expect(folders.toSorted()).toEqual(Object.keys(results).toSorted());
  const readme = readFileSync(join(root, "examples/README.md"), "utf8");
  expect(folders.filter((name) => !readme.includes(`](${name}/index.ts)`))).toEqual([]);
});

test("the command says what it can do, and what it cannot", async () => {
  expect(await run("packages/cli/src/bin.ts", ["--help"])).toMatchObject({
    code: 0,
    output: expect.stringContaining("demo"),
  });
  expect(await run("packages/cli/src/bin.ts", ["dmeo"])).toMatchObject({
    code: 2,
    output: expect.stringContaining("demo"),
  });
});
