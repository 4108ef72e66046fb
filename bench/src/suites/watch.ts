/** What it costs to be watched: a locked check-then-write with hazards, slow sections and the order of locks, and without. */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { startPostgres } from "@holdfast/cli";
import { type HoldfastOptions, holdfast, key } from "holdfast";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { fromPg } from "holdfast/pg";
import { Client, Pool } from "pg";
import { fillPostgres, manyUsers, postgresTables, userOf } from "../../../packages/cli/src/bench/locks.ts";
import { type Contestant, alternate } from "../../../packages/cli/src/bench/measure.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";

/** As in the suite of locks. */
const callers = 4;

const modes = {
  on: { hazards: "count" },
  off: { hazards: "off", slow: false },
} as const satisfies Record<string, HoldfastOptions>;
type Mode = keyof typeof modes;

/** One instance at a time: while one watches, Node publishes for the whole process. */
function contestantsOf(
  open: (options: HoldfastOptions) => { call: Contestant["call"]; close(): Promise<void> },
): Contestant[] {
  let current: { readonly mode: Mode; readonly instance: ReturnType<typeof open> } | undefined;
  const instanceOf = (mode: Mode) => {
    if (current?.mode !== mode) {
      void current?.instance.close();
      current = { mode, instance: open(modes[mode]) };
    }
    return current.instance;
  };
  return (Object.keys(modes) as Mode[]).map((mode) => ({
    name: `watched: ${mode}`,
    call: (turn) => instanceOf(mode).call(turn),
  }));
}

export async function run({ seconds, note }: SuiteOptions): Promise<Report> {
  await using cleanup = new AsyncDisposableStack();
  const server = await startPostgres();
  cleanup.defer(() => server.stop());
  const admin = new Client({ connectionString: server.url() });
  await admin.connect();
  cleanup.defer(() => admin.end());
  const { rows: versions } = await admin.query<{ version: string }>(
    "SELECT current_setting('server_version') AS version",
  );
  for (const statement of postgresTables) await admin.query(statement);
  const pool = new Pool({ connectionString: server.url(), max: callers });
  cleanup.defer(() => pool.end());
  const folder = mkdtempSync(join(tmpdir(), "holdfast-bench-"));
  cleanup.defer(() => rmSync(folder, { recursive: true, force: true }));
  const file = join(folder, "watch.db");
  const own = new DatabaseSync(file);
  own.exec("PRAGMA journal_mode = WAL; CREATE TABLE image (user_id int, bytes int)");
  own.exec("CREATE INDEX image_user ON image (user_id)");
  cleanup.defer(() => own.close());

  const cells = [
    {
      name: "pg: a lock, a sum, an insert, an update",
      ratio: "hazards_on",
      reset: () => fillPostgres(admin, manyUsers),
      contestants: contestantsOf((options) => {
        const hf = holdfast(fromPg(pool), options);
        return {
          call: (turn) => {
            const user = userOf(turn, manyUsers);
            return hf.transaction({ lock: key("upload", user) }, async ({ client }) => {
              await client.query("SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE user_id = $1", [
                user,
              ]);
              await client.query("INSERT INTO image (user_id, bytes) VALUES ($1, $2)", [user, 10]);
              await client.query("UPDATE image SET bytes = bytes + 1 WHERE user_id = $1 AND bytes < 0", [
                user,
              ]);
            });
          },
          close: () => hf.close(),
        };
      }),
    },
    // For information: nothing is waited for here, so all of it shows.
    {
      name: "node:sqlite: the same",
      ratio: "hazards_on_sqlite",
      reset: async () => own.exec("DELETE FROM image"),
      contestants: contestantsOf((options) => {
        const hf = holdfast(
          fromNodeSqlite(() => new DatabaseSync(file)),
          options,
        );
        return {
          call: (turn) => {
            const user = userOf(turn, manyUsers);
            return hf.transaction({ lock: key("upload", user) }, async ({ client }) => {
              client.prepare("SELECT coalesce(sum(bytes), 0) AS used FROM image WHERE user_id = ?").get(user);
              client.prepare("INSERT INTO image (user_id, bytes) VALUES (?, ?)").run(user, 10);
              client.prepare("UPDATE image SET bytes = bytes + 1 WHERE user_id = ? AND bytes < 0").run(user);
            });
          },
          close: () => hf.close(),
        };
      }),
    },
  ];

  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  for (const { name, ratio, reset, contestants } of cells) {
    note(`${name} …`);
    const measured = await alternate({ contestants, callers, seconds, reset, rounds: 12 });
    for (const { name: contestant, ...figures } of measured)
      rows.push({ cell: name, contestant, ...figures });
    const [on, off] = measured.map(({ opsPerSecond }) => opsPerSecond);
    ratios[ratio] = Number(((on ?? Number.NaN) / (off ?? Number.NaN)).toFixed(3));
  }
  return { suite: "watch", machine: machine(versions[0]?.version ?? ""), rows, ratios };
}
