/** One of the demo's processes, as a replica of a service is: it has connections of its own, and takes orders. */
import { subscribe } from "node:diagnostics_channel";
import { type Events, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { QuotaExceededError } from "holdfast/quota";
import { InsufficientStockError } from "holdfast/stock";
import { Pool } from "pg";
import { describe } from "../describe.ts";
import { type FromWorker, type Setting, type Tally, type ToWorker, spareConnections } from "./protocol.ts";
import { Refused, type Way } from "./race.ts";
import { races } from "./races.ts";

/** Everybody wants the same lock, so the wait is as long as the queue: longer than a service would want it. */
const wait = 30_000;

const newTally = (): Tally => ({ granted: 0, refused: 0, failed: {}, retried: 0 });

class Replica {
  readonly #setting: Setting;
  readonly #pool: Pool;
  readonly #hf;
  #tally = newTally();
  #latenciesMs: number[] = [];

  constructor(setting: Setting) {
    this.#setting = setting;
    this.#pool = new Pool({
      connectionString: setting.url,
      max: setting.callers + spareConnections,
      idleTimeoutMillis: 0,
    });
    // A lost connection is reported by the next query, whether somebody has it or not.
    this.#pool.on("error", () => {});
    this.#pool.on("connect", (client) => client.on("error", () => {}));
    this.#hf = holdfast(fromPg(this.#pool), { wait });
    subscribe("holdfast:transaction:retry", () => void this.#tally.retried++);
    // Jobs are called by the worker of a queue, and not by us.
    subscribe("holdfast:queue:done", (event) => {
      this.#tally.granted++;
      this.#latenciesMs.push((event as Events["holdfast:queue:done"]).durationMs);
    });
  }

  /** Opens all connections, and asks the server what it can, so that no way pays for it. */
  async warm(): Promise<void> {
    const { callers } = this.#setting;
    const clients = await Promise.all(Array.from({ length: callers }, () => this.#pool.connect()));
    for (const client of clients) client.release();
    await this.#hf.capabilities();
  }

  async run(way: Way, shared: boolean): Promise<void> {
    const tally = (this.#tally = newTally());
    const latenciesMs: number[] = (this.#latenciesMs = []);
    let reached = 0;
    const told = (): number => (shared ? reached : latenciesMs.length);
    const progress = setInterval(() => tell({ kind: "progress", finished: told() }), 50);
    try {
      await way.run({
        pool: this.#pool,
        hf: this.#hf,
        setting: this.#setting,
        progress: (finished) => (reached = Math.max(reached, finished)),
        async call(work) {
          const since = performance.now();
          const well = await work().then(
            () => {
              tally.granted++;
              return true;
            },
            (error: unknown) => count(tally, error),
          );
          latenciesMs.push(performance.now() - since);
          return well;
        },
      });
    } finally {
      clearInterval(progress);
    }
    tell({ kind: "done", tally, latenciesMs });
  }
}

/** What the rules say no to: no failures. */
const refusals = [Refused, QuotaExceededError, InsufficientStockError];

/** Whether it is no failure. */
function count(tally: Tally, error: unknown): boolean {
  if (refusals.some((kind) => error instanceof kind)) {
    tally.refused++;
    return true;
  }
  const code = codeOf(error);
  tally.failed[code] = (tally.failed[code] ?? 0) + 1;
  return false;
}

function codeOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return "code" in error && typeof error.code === "string" ? error.code : error.name;
}

function tell(message: FromWorker): void {
  // The parent may be gone, also while this is on its way, and then so are we. Without somebody to tell it to, the
  // failure would be thrown.
  if (process.connected) process.send?.(message, undefined, undefined, () => {});
}

let replica: Replica | undefined;

async function handle(message: ToWorker): Promise<void> {
  if (message.kind === "set-up") {
    replica = new Replica(message.setting);
    await replica.warm();
    tell({ kind: "ready" });
    return;
  }
  const race = races.find(({ name }) => name === message.race);
  const way = race?.ways.find(({ name }) => name === message.way);
  if (!race || !way || !replica) throw new Error(`no ${message.way} of ${message.race}`);
  await replica.run(way, race.shared);
}

// Ctrl-C reaches the whole process group; the parent decides, and its end is ours.
process.on("SIGINT", () => {});
process.on("SIGTERM", () => {});
process.on("disconnect", () => process.exit());
process.on("message", (message: ToWorker) => {
  handle(message).catch((error: unknown) => tell({ kind: "error", message: describe(error) }));
});
