/**
 * Four processes on quota, stock, once, locks and leases, while processes are killed and frozen, backends are killed, the server
 * crashes, also at the very COMMIT, and connections are cut right after it. Every call is on disk before it is made, and what
 * it was told is on disk before the next: then the database is asked whether all of that is true.
 */
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { type EmbeddedPostgres, startPostgres } from "@holdfast/cli";
import { type Holdfast, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { quota } from "holdfast/quota";
import { stock } from "holdfast/stock";
import { Client, Pool, type PoolClient } from "pg";
import { expect, inject, test } from "vitest";
import { unavailable } from "./harness/databases.ts";
import { killBackend } from "./harness/killed-backend.ts";
import { oldBinaries } from "./harness/old-postgres.ts";
import { type Worker, startWorker } from "./harness/processes.ts";
import { isCommit, startProxy } from "./harness/proxy.ts";
import { random } from "./harness/random.ts";
import { eventually } from "./harness/wait.ts";
import { type ChaosArg, type Kind, type Line, kinds, limit } from "./workers/chaos.ts";

const worker = new URL("./workers/chaos.ts", import.meta.url);
const long = process.env["HOLDFAST_LONG"] !== undefined;
const forMs = long ? 600_000 : 30_000;
const processes = 4;
const callers = 3;
const subjects = ["0", "1", "2"];

// Nothing is flushed but by a COMMIT: so that a crash can lose as much as it ever can.
const settings = { fsync: "off", wal_writer_delay: "10s", max_connections: "200" };

test.for([
  ["PostgreSQL 18", "postgres"],
  ...(long ? [["an older PostgreSQL", "postgresOld"] as const] : []),
] as const)(
  "what was told is true, ids are applied once, sums add up, and nothing is left: %s",
  { timeout: forMs + 300_000 },
  async ([, name], { skip }) => {
    const why = unavailable(name);
    skip(why !== undefined, why);
    const binDir = name === "postgresOld" ? oldBinaries() : undefined;
    const server = await startPostgres({ settings, ...(binDir && { binDir }) });
    const folder = mkdtempSync(join(tmpdir(), "holdfast-chaos-"));
    try {
      const counts = await storm(server, folder, inject("seed"));
      console.log(`chaos: ${JSON.stringify(counts)}`);
    } finally {
      await server.stop();
      rmSync(folder, { recursive: true });
    }
  },
);

async function storm(server: EmbeddedPostgres, folder: string, seed: number): Promise<object> {
  const next = random(seed);
  const ask = async (text: string): Promise<Record<string, unknown>[]> => {
    const client = new Client({ connectionString: server.url() });
    client.on("error", () => {});
    await client.connect();
    try {
      return (await client.query(text)).rows as Record<string, unknown>[];
    } finally {
      await client.end().catch(() => {});
    }
  };
  const own = new Pool({ connectionString: server.url(), max: 3 });
  own.on("error", () => {});
  const hf = holdfast(fromPg(own));
  await hf.migrate();
  await ask(`CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY, kind text NOT NULL, id text NOT NULL, of text NOT NULL, fence bigint NOT NULL);
    CREATE TABLE counter (of text PRIMARY KEY, n int NOT NULL);
    INSERT INTO counter SELECT unnest('{0,1,2}'::text[]), 0`);

  const proxy = await startProxy({ port: server.port });
  const url = proxy.url(server.url());
  const files: string[] = [];
  let lives = 0;
  const start = async (): Promise<Worker> => {
    const life = `life ${++lives}`;
    const file = join(folder, `${lives}.jsonl`);
    files.push(file);
    const arg: ChaosArg = { url, file, life, seed: seed + lives, callers };
    const started = startWorker(worker, arg);
    await started.message("ready");
    return started;
  };
  const workers = await Promise.all(Array.from({ length: processes }, start));
  const done = { kills: 0, freezes: 0, crashes: 0, crashesAtCommit: 0, backends: 0, cuts: 0, answers: 0 };

  /** Resolves once the next COMMIT is on its way, and does with it what is said; undefined if none came. */
  const atCommit = (verdict: "stall" | "drop-answer"): Promise<true | undefined> => {
    let met!: (value: true) => void;
    const meeting = new Promise<true>((resolve) => (met = resolve));
    proxy.cutWhen((direction, chunk) => {
      if (direction !== "to-server" || !isCommit(chunk)) return "pass";
      proxy.cutWhen(undefined);
      met(true);
      return verdict;
    });
    return Promise.race([meeting, sleep(3000).then(() => proxy.cutWhen(undefined))]) as Promise<
      true | undefined
    >;
  };

  const blows: (() => Promise<void>)[] = [
    async () => {
      const at = Math.floor(next() * processes);
      (workers[at] as Worker).sigkill();
      await (workers[at] as Worker).exited;
      workers[at] = await start();
      done.kills++;
    },
    async () => {
      const victim = workers[Math.floor(next() * processes)] as Worker;
      victim.sigstop();
      await sleep(300 + next() * 1500);
      victim.sigcont();
      done.freezes++;
    },
    async () => {
      await server.restart("immediate");
      done.crashes++;
    },
    async () => {
      if (!(await atCommit("stall"))) return;
      await server.restart("immediate");
      // The others commit, and get the ids that were lost.
      await sleep(300);
      proxy.cut();
      done.crashesAtCommit++;
    },
    async () => {
      await killBackend(server.url());
      done.backends++;
    },
    async () => {
      proxy.cut();
      done.cuts++;
    },
    async () => {
      if (await atCommit("drop-answer")) done.answers++;
    },
  ];

  const until = performance.now() + forMs;
  // Each of them at least once, whatever the seed.
  for (let i = 0; performance.now() < until || i < blows.length; i++) {
    const blow = blows[i < blows.length ? i : Math.floor(next() * blows.length)] as () => Promise<void>;
    await blow();
    await sleep(300 + next() * 900);
  }
  for (const each of workers) each.send("stop");
  // What a call waits for at the most is over by then; one that threw something that nobody can rely on says so here.
  await Promise.all(workers.map((each) => each.result));
  await proxy.close();

  const told = read(files);
  const seen = await applied(ask, hf);
  const counts: Record<string, number> = {};
  for (const [id, { kind, outcome }] of told) {
    const times = seen.get(`${kind} ${id}`) ?? 0;
    const most = `${kind} ${id}, told ${outcome ?? "nothing"}: applied ${times} times`;
    expect(times, most).toBeLessThanOrEqual(1);
    if (outcome === "done") expect(times, most).toBe(1);
    if (outcome === "not done") expect(times, most).toBe(0);
    const name = `${kind} ${outcome ?? "killed"}`;
    counts[name] = (counts[name] ?? 0) + 1;
  }
  for (const kind of kinds) expect(counts[`${kind} done`] ?? 0, kind).toBeGreaterThan(20);

  await nothingLeft(ask, hf);
  await hf.close();
  await own.end();
  return { ...done, ...counts };
}

function read(files: readonly string[]): Map<string, { kind: Kind; outcome: string | undefined }> {
  const calls = new Map<string, { kind: Kind; outcome: string | undefined }>();
  for (const file of files) {
    const lines = readFileSync(file, "utf8").split("\n").filter(Boolean);
    for (const [at, text] of lines.entries()) {
      let line: Line;
      try {
        line = JSON.parse(text) as Line;
      } catch (error) {
        // Its process was killed in the middle of it.
        if (at === lines.length - 1) break;
        throw error;
      }
      if ("kind" in line) calls.set(line.id, { kind: line.kind, outcome: undefined });
      else (calls.get(line.id) as { outcome: string }).outcome = line.told;
    }
  }
  return calls;
}

/** How often each call was applied, and that all sums are what these come to. */
async function applied(
  ask: (text: string) => Promise<Record<string, unknown>[]>,
  hf: Holdfast<PoolClient>,
): Promise<Map<string, number>> {
  const seen = new Map<string, number>();
  const see = (name: string) => seen.set(name, (seen.get(name) ?? 0) + 1);
  for (const { kind, id } of await ask("SELECT kind, id FROM effect")) see(`${String(kind)} ${String(id)}`);

  const uses = quota(hf, { name: "chaos", limit });
  const shelf = stock(hf);
  for (const of of subjects) {
    let sum = 0;
    for (let before: number | undefined; ;) {
      const page = await uses.history(`user ${of}`, { limit: 500, ...(before !== undefined && { before }) });
      for (const { id, amount } of page.entries) {
        see(`quota ${id}`);
        sum += amount;
      }
      before = page.next;
      if (before === undefined) break;
    }
    expect((await uses.peek(`user ${of}`)).used).toBe(sum);
    expect(await uses.reconcile(`user ${of}`)).toMatchObject({ ok: true, findings: [] });

    for (const id of await idsOf(shelf, `sku ${of}`)) see(`stock ${id}`);

    const [counter] = await ask(`SELECT n FROM counter WHERE of = '${of}'`);
    const [locked] = await ask(`SELECT count(*)::int AS n FROM effect WHERE kind = 'lock' AND of = '${of}'`);
    expect(counter).toEqual(locked);

    // Who wrote with an older fence, wrote before.
    const fences = (
      await ask(`SELECT fence FROM effect WHERE kind = 'lease' AND of = '${of}' ORDER BY n`)
    ).map(({ fence }) => Number(fence));
    expect(fences).toEqual(fences.toSorted((a, b) => a - b));
  }
  expect(await shelf.reconcile()).toMatchObject({ ok: true });
  return seen;
}

async function idsOf(shelf: ReturnType<typeof stock>, sku: string): Promise<string[]> {
  const found: string[] = [];
  for (let after: string | undefined; ;) {
    const page = await shelf.history({ sku, limit: 500, ...(after !== undefined && { after }) });
    found.push(...page.movements.map(({ externalId }) => externalId));
    after = page.next;
    if (after === undefined) return found;
  }
}

/** Neither locks, nor sessions in a transaction, nor leases. */
async function nothingLeft(
  ask: (text: string) => Promise<Record<string, unknown>[]>,
  hf: Holdfast<PoolClient>,
): Promise<void> {
  await eventually(async () => {
    const locks = await ask("SELECT FROM pg_locks WHERE locktype = 'advisory'");
    const open = await ask(
      "SELECT FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()",
    );
    return locks.length + open.length + (await hf.leases()).length === 0;
  });
}
