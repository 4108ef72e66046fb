/** Quota, stock and queue on one SQLite file, by better-sqlite3, next to the same by hand; and queues next to plainjob. */
import { type ChildProcess, fork } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import type Database from "better-sqlite3";
import { holdfast } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { JobStatus, better, defineQueue, defineWorker } from "plainjob";
import { plenty } from "../../../packages/cli/src/bench/stock.ts";
import { type Drain, type JobPayload, draining, holdfastDrain, payloads } from "./patterns-drain.ts";
import {
  exact,
  fewEntries,
  hotSku,
  limit,
  living,
  manyEntries,
  reconciled,
  shop as shopOf,
  shortLife,
  stockUp,
  units as unitsOf,
  users,
} from "./patterns-ours.ts";
import { type FileAnswer, type FileCell, type FileOrder, openFile } from "./patterns-process.ts";
import {
  type PatternCell,
  type PatternGround,
  type Racer,
  callers,
  callsOf,
  counting,
  looping,
  textbook,
} from "./patterns-race.ts";

const processes = 4;
const plainjob = "plainjob";
const byHandName = "textbook: UPDATE … RETURNING, then DELETE, one job at a time";
const quiet = { debug() {}, info() {}, warn() {}, error: console.error };

/** A process on the file. It stays for all rounds: a service is warm. */
class FileHand {
  readonly #child: ChildProcess;
  readonly #died = Promise.withResolvers<never>();

  constructor() {
    this.#child = fork(fileURLToPath(new URL("./patterns-process.ts", import.meta.url)));
    this.#child.once("exit", (code, signal) =>
      this.#died.reject(new Error(`A process on the file ended with ${code ?? signal}`)),
    );
    this.#died.promise.catch(() => {});
  }

  async run(order: FileOrder): Promise<Extract<FileAnswer, { round: unknown }>["round"]> {
    const answered = Promise.withResolvers<FileAnswer>();
    this.#child.once("message", answered.resolve);
    this.#child.send(order);
    const answer = await Promise.race([answered.promise, this.#died.promise]);
    if ("error" in answer) throw new Error(answer.error);
    return answer.round;
  }

  [Symbol.dispose](): void {
    this.#child.kill("SIGKILL");
  }
}

function together(name: string, hands: readonly FileHand[], order: Omit<FileOrder, "callers" | "ms">): Racer {
  return {
    name,
    round: (ms) =>
      counting(callsOf, undefined, async () => {
        const rounds = await Promise.all(
          hands.map((hand) => hand.run({ ...order, callers: callers / hands.length, ms })),
        );
        return {
          opsPerSecond: rounds.reduce((sum, { opsPerSecond }) => sum + opsPerSecond, 0),
          latenciesMs: rounds.flatMap(({ latenciesMs }) => latenciesMs),
        };
      }),
  };
}

/** Marked as taken, done, deleted: a worker that dies leaves what a look at the marks finds. */
function drainByHand(db: Database.Database): Drain {
  db.exec(
    "CREATE TABLE job (id integer PRIMARY KEY AUTOINCREMENT, payload text NOT NULL, taken_at integer); CREATE INDEX job_free ON job (id) WHERE taken_at IS NULL",
  );
  const take = db.prepare<[number], { id: number; payload: string }>(
    `UPDATE job SET taken_at = ? WHERE id = (SELECT id FROM job WHERE taken_at IS NULL ORDER BY id LIMIT 1) RETURNING id, payload`,
  );
  const insert = db.prepare("INSERT INTO job (payload) VALUES (?)");
  const end = db.prepare("DELETE FROM job WHERE id = ?");
  const fill = db.transaction((some: readonly JobPayload[]) => {
    for (const each of some) insert.run(JSON.stringify(each));
  });
  return {
    name: byHandName,
    async fill(jobs) {
      for (const some of payloads(jobs)) fill(some);
    },
    async drain(_, handler) {
      for (let row = take.get(Date.now()); row; row = take.get(Date.now())) {
        // A handler may be asynchronous, as everybody's is.
        await Promise.resolve(handler((JSON.parse(row.payload) as JobPayload).n));
        end.run(row.id);
      }
    },
    left: async () => Number(db.prepare("SELECT count(*) FROM job").pluck().get()),
  };
}

/** `later`: its timer has to be ended before its file is closed. */
function drainByPlainjob(db: Database.Database, later: (end: () => void) => void): Drain {
  const jobs = defineQueue({ connection: better(db), logger: quiet });
  later(() => jobs.close());
  return {
    name: plainjob,
    async fill(count) {
      // It keeps what is done for a week.
      db.exec("DELETE FROM plainjob_jobs");
      for (const some of payloads(count)) jobs.addMany("noop", some);
    },
    async drain(count, handler) {
      let ended = 0;
      const all = Promise.withResolvers<void>();
      const worker = defineWorker(
        "noop",
        ({ data }) => {
          handler((JSON.parse(data) as JobPayload).n);
        },
        {
          queue: jobs,
          logger: quiet,
          onCompleted: () => {
            if (++ended === count) all.resolve();
          },
          onFailed: (_, error) => all.reject(new Error(error)),
        },
      );
      const running = worker.start();
      await all.promise;
      await worker.stop();
      await running;
    },
    left: async () =>
      jobs.countJobs({ status: JobStatus.Pending }) + jobs.countJobs({ status: JobStatus.Processing }),
  };
}

/** A quota that has been used so often: its bucket, and a line for each use. */
function live(db: Database.Database, subject: string, entries: number): void {
  const { lastInsertRowid } = db
    .prepare(
      `INSERT INTO holdfast_quota_bucket (quota, subject, used, held, credit, version, reset) VALUES ('life', ?, ?, 0, 0, ?, 0)`,
    )
    .run(subject, entries, entries);
  db.prepare(
    `WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)
      INSERT INTO holdfast_quota_line (bucket, version, kind, id, amount, used, max, at)
      SELECT ?, n, 'consume', 'before-' || n, 1, n, ?, unixepoch() * 1000000 FROM numbers`,
  ).run(entries, lastInsertRowid, limit);
}

export async function sqliteGround(wanted: Readonly<Record<string, number>>): Promise<PatternGround> {
  await using cleanup = new AsyncDisposableStack();
  const folder = await mkdtemp(join(tmpdir(), "holdfast-bench-"));
  cleanup.defer(() => rm(folder, { recursive: true, force: true }));
  const endings: (() => void)[] = [];
  cleanup.defer(() => {
    for (const end of endings.toReversed()) end();
  });
  const open = (name: string): Database.Database => {
    const db = openFile(join(folder, name));
    endings.push(() => db.close());
    return db;
  };
  const byHand = open("textbook.db");
  byHand.exec(`CREATE TABLE account (user_id integer PRIMARY KEY, used integer NOT NULL);
    CREATE TABLE ledger (id integer PRIMARY KEY, user_id integer NOT NULL, amount integer NOT NULL, used integer NOT NULL,
      request_id text NOT NULL, at real NOT NULL);
    CREATE INDEX ledger_user ON ledger (user_id);
    CREATE TABLE variant (sku text PRIMARY KEY, stock integer NOT NULL);
    CREATE TABLE movement (id integer PRIMARY KEY, sku text NOT NULL, quantity integer NOT NULL, source text NOT NULL,
      reference_type text, reference_id text, at real NOT NULL);
    CREATE INDEX movement_sku ON movement (sku, at)`);
  const insert = byHand.prepare("INSERT INTO account VALUES (?, 0)");
  byHand.transaction(() => {
    for (let user = 0; user < users; user++) insert.run(user);
  })();
  byHand.prepare("INSERT INTO variant VALUES (?, ?)").run(hotSku, plenty);
  const file = join(folder, "holdfast.db");
  const admin = open("holdfast.db");
  const hf = holdfast(fromBetterSqlite3(() => open("holdfast.db")));
  cleanup.defer(() => hf.close());
  await hf.migrate();
  await stockUp(shopOf(hf));
  const hands = Array.from({ length: processes }, () => cleanup.use(new FileHand()));

  const ratio = (name: string, ...others: string[]) => ({
    name,
    others,
    ...(wanted[name] !== undefined && { wanted: wanted[name] }),
  });
  const hotCell = (name: string, cell: FileCell): PatternCell => ({
    name,
    ratios: [ratio(`sqlite_${cell}_hot`, textbook)],
    open: async () => [
      together(textbook, hands, { file: join(folder, "textbook.db"), cell, ours: false }),
      together(`holdfast/${cell}`, hands, { file, cell, ours: true }),
    ],
  });
  const cells: PatternCell[] = [
    hotCell(`quota, one hot subject, 64 callers in ${processes} processes`, "quota"),
    hotCell(`stock, one hot SKU, 64 callers in ${processes} processes`, "stock"),
    {
      name: "queue, drain, 1 process",
      ratios: [ratio("sqlite_drain_vs_best", plainjob), ratio("sqlite_drain", byHandName)],
      open: async () => [
        draining(drainByPlainjob(open("plainjob.db"), (end) => endings.push(end))),
        draining(drainByHand(open("by-hand.db"))),
        draining(holdfastDrain(hf)),
      ],
    },
    {
      name: "quota, one caller",
      ratios: [ratio("sqlite_long_life", shortLife)],
      async open() {
        live(admin, "short", fewEntries);
        live(admin, "long", manyEntries);
        admin.exec("ANALYZE; PRAGMA wal_checkpoint(TRUNCATE)");
        return living(hf).map((each) => looping(each, 1));
      },
    },
  ];
  const rest = cleanup.move();
  return {
    name: "SQLite",
    about: `SQLite ${String(admin.prepare("SELECT sqlite_version()").pluck().get())}, better-sqlite3, WAL, synchronous = NORMAL`,
    cells,
    async check() {
      const lost = byHand
        .prepare("SELECT (SELECT count(*) FROM ledger) - (SELECT sum(used) FROM account)")
        .pluck()
        .get();
      exact("uses that the textbook has lost", Number(lost), 0);
      await reconciled(unitsOf(hf), shopOf(hf));
    },
    [Symbol.asyncDispose]: () => rest.disposeAsync(),
  };
}
