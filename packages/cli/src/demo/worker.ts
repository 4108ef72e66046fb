import { setTimeout as sleep } from "node:timers/promises";
import { holdfast, key } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type ClientBase, Pool } from "pg";
import type { Contestant, FromWorker, Setting, Tally, ToWorker } from "./protocol.ts";

class QuotaFull extends Error {}

/**
 * The body, the same for all contestants: check, then write. The pause stands for what real code does in between
 * (look at the file, ask another table); it makes the race show on a machine of any speed, but does not make it.
 */
async function upload(client: ClientBase, { table, user, limit }: Setting): Promise<void> {
  const { rows } = await client.query<{ n: number }>(
    `SELECT count(*)::int AS n FROM ${table} WHERE user_id = $1`,
    [user],
  );
  if ((rows[0]?.n ?? 0) >= limit) throw new QuotaFull();
  await sleep(1);
  await client.query(`INSERT INTO ${table} (user_id) VALUES ($1)`, [user]);
}

function contestantsOn(pool: Pool, setting: Setting): Record<Contestant, () => Promise<void>> {
  const hf = holdfast(fromPg(pool));
  const byHand = async (begin: string): Promise<void> => {
    const client = await pool.connect();
    try {
      await client.query(begin);
      await upload(client, setting);
      await client.query("COMMIT");
    } catch (error) {
      await client.query("ROLLBACK");
      throw error;
    } finally {
      client.release();
    }
  };
  return {
    naive: () => byHand("BEGIN ISOLATION LEVEL READ COMMITTED"),
    serializable: () => byHand("BEGIN ISOLATION LEVEL SERIALIZABLE"),
    // Everybody wants the one lock, so the wait is as long as the queue: longer than a service would want it.
    holdfast: () =>
      hf.transaction({ lock: key("upload", setting.user), wait: 30_000 }, (tx) => upload(tx.client, setting)),
  };
}

async function run(attempt: () => Promise<void>, calls: number, callers: number): Promise<void> {
  const tally: Tally = { granted: 0, refused: 0, failed: {} };
  const latenciesMs: number[] = [];
  let started = 0;
  const progress = setInterval(() => tell({ kind: "progress", finished: latenciesMs.length }), 50);
  const caller = async (): Promise<void> => {
    while (started++ < calls) {
      const since = performance.now();
      try {
        await attempt();
        tally.granted++;
      } catch (error) {
        if (error instanceof QuotaFull) tally.refused++;
        else {
          const code = codeOf(error);
          tally.failed[code] = (tally.failed[code] ?? 0) + 1;
        }
      }
      latenciesMs.push(performance.now() - since);
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  clearInterval(progress);
  tell({ kind: "done", tally, latenciesMs });
}

function codeOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return "code" in error && typeof error.code === "string" ? error.code : error.name;
}

/** Opens all connections, so that no contestant pays for it. */
async function warm(pool: Pool, size: number): Promise<void> {
  const clients = await Promise.all(Array.from({ length: size }, () => pool.connect()));
  for (const client of clients) client.release();
}

function tell(message: FromWorker): void {
  // The parent may be gone, and then so are we.
  if (process.connected) process.send?.(message);
}

let pool: Pool | undefined;
let attempts: Record<Contestant, () => Promise<void>> | undefined;
let callers = 1;

async function handle(message: ToWorker): Promise<void> {
  if (message.kind === "set-up") {
    const { setting } = message;
    callers = setting.callers;
    pool = new Pool({ connectionString: setting.url, max: callers, idleTimeoutMillis: 0 });
    pool.on("error", () => {});
    await warm(pool, callers);
    attempts = contestantsOn(pool, setting);
    tell({ kind: "ready" });
  } else if (attempts) {
    await run(attempts[message.contestant], message.calls, callers);
  }
}

// Ctrl-C reaches the whole process group; the parent decides, and its end is ours.
process.on("SIGINT", () => {});
process.on("SIGTERM", () => {});
process.on("disconnect", () => process.exit());
process.on("message", (message: ToWorker) => {
  handle(message).catch((error: unknown) => tell({ kind: "error", message: String(error) }));
});
