/** How locks of a database are kept, for everybody who uses it; and the one way to change that. */
import { type Agreed, type Agreements, trustMs } from "../seam/agreements.ts";
import { type Strategy, require, strategies } from "../seam/capabilities.ts";
import type { Connection } from "../seam/database.ts";
import { withConnection } from "../transaction/one-shot.ts";
import { presenting } from "../transaction/present.ts";
import {
  type Holder,
  SchemaMissingError,
  StrategyError,
  UnsupportedError,
  UsageError,
  message,
} from "../seam/errors.ts";
import { checkText, optionalText } from "../input/values.ts";
import { checkNames, checkSignal } from "../input/options.ts";
import { contextOf } from "../transaction/scope.ts";
import { milliseconds, sleep } from "../waiting/wait.ts";

export interface AgreedStrategy {
  /** Undefined: nobody has taken a lock yet, or this user may not see it. */
  readonly strategy: Strategy | undefined;
  /** It is being changed to this, or whoever did so was stopped: nobody gets a lock until that is over. */
  readonly changingTo: Strategy | undefined;
}

export interface ChangeStrategyOptions {
  /** Who does it, for the audit. */
  readonly actor: string;
  /** Why, for the audit. */
  readonly note?: string | undefined;
  /** How long to wait for those who have locks of the old kind, after they can get no new ones. Default 5,000 ms. */
  readonly wait?: number;
  /** Ends it, and all is as before. */
  readonly signal?: AbortSignal | undefined;
}

export interface ChangedStrategy {
  readonly from: Strategy | undefined;
  readonly to: Strategy;
  /** False: locks were kept like that already. */
  readonly changed: boolean;
}

/** Clocks of two machines do not run at the same pace; 30 s of one are no more than 31 of the other. */
const marginMs = 1000;
const lookMs = 200;
/** Of people who are named in an error. */
const named = 5;

/** How locks are kept in this database, by what is written down there. */
export async function strategyOf(hf: object): Promise<AgreedStrategy> {
  const context = contextOf(hf, "strategyOf");
  const { agreements } = context.database.engine;
  // Where there is one way to keep them, there is nothing to write down.
  if (!agreements) {
    const { transactionLocks } = await context.capabilities();
    return { strategy: transactionLocks as Strategy, changingTo: undefined };
  }
  const { there } = await presenting(context.database, ["strategyOf"], () =>
    withConnection(context, (connection) => agreements.read(connection)),
  );
  const found = there?.get("strategy");
  return { strategy: found?.value as Strategy | undefined, changingTo: found?.next as Strategy | undefined };
}

/**
 * Changes how locks of this database are kept, for everybody: `await changeStrategy(hf, "lock row", { actor: "ada" })`. From its
 * beginning nobody gets a lock. After half a minute everybody knows, and if nobody has a lock of the old kind by then, it is
 * done; else all is as before, and it throws. Instances without the option `strategy` go on with the new one.
 *
 * If a process dies in the middle of it, no lock is given until somebody calls it again: with the same strategy, to go on,
 * or with the one that was there before, to go back.
 */
export async function changeStrategy(
  hf: object,
  to: Strategy,
  options: ChangeStrategyOptions,
): Promise<ChangedStrategy> {
  const context = contextOf(hf, "changeStrategy");
  if (!strategies.includes(to))
    throw new UsageError(
      `changeStrategy: it must be one of ${strategies.map((each) => `"${each}"`).join(", ")}`,
    );
  checkNames("changeStrategy", options, new Set(["actor", "note", "wait", "signal"]));
  const { actor, note, wait = 5000, signal } = options;
  checkText("changeStrategy", "actor", actor, { most: 1000 });
  optionalText("changeStrategy", "note", note);
  milliseconds(wait, "changeStrategy: wait");
  checkSignal(signal);
  signal?.throwIfAborted();
  const { engine, traits } = context.database;
  const { agreements } = engine;
  if (!agreements)
    throw new UnsupportedError(`changeStrategy: on ${engine.name} there is one way to keep locks`);
  const audits = require(engine.audit, "changeStrategy");
  const on = <T>(work: (connection: Connection) => Promise<T>) =>
    presenting(context.database, ["changeStrategy"], () => withConnection(context, work));
  // Refuses what this server does not have.
  await on((connection) => engine.probe(connection, traits, to));
  const change = new Change(agreements, on);
  const before = await change.begin(to);
  if (before.value === to && before.next === undefined) return { from: to, to, changed: false };
  const from = before.value as Strategy;
  const details = JSON.stringify({ from, to, ...(note !== undefined && { note }) });
  const line = { actor, action: "strategy.set", target: "strategy", details };
  const alone = { waitMs: wait, free: context.database.connect !== undefined };
  const id = await on(async (connection) => audits.begin(connection, line, alone));
  const end = (how: Parameters<typeof audits.end>[2]) =>
    on(async (connection) => audits.end(connection, id, how, alone)).catch(() => {});
  try {
    if (before.value === to) await change.write(before, to);
    else await change.run(before, from, to, { wait, signal });
    await end({ outcome: "done", result: undefined, error: undefined });
    return { from, to, changed: true };
  } catch (error) {
    await end({ outcome: "failed", result: undefined, error: message(error).slice(0, 4000) });
    throw error;
  }
}

type On = <T>(work: (connection: Connection) => Promise<T>) => Promise<T>;

class Change {
  readonly #agreements: Agreements<Connection>;
  readonly #on: On;

  constructor(agreements: Agreements<Connection>, on: On) {
    this.#agreements = agreements;
    this.#on = on;
  }

  /** What is written down. If nothing is, it is what was not asked for: so nobody who has looked and found nothing is missed. */
  async begin(to: Strategy): Promise<Agreed> {
    const other: Strategy = to === "lock row" ? "transaction advisory" : "lock row";
    const found = await this.#on(async (connection) => {
      const { there } = await this.#agreements.read(connection);
      if (!there || there.has("strategy")) return there?.get("strategy");
      await this.#agreements.write(connection, "strategy", other);
      return (await this.#agreements.read(connection)).there?.get("strategy");
    });
    if (!found) throw new SchemaMissingError("The table that says how locks are kept");
    return found;
  }

  async write(before: Agreed, value: Strategy, next?: Strategy): Promise<Agreed> {
    const now = await this.#on((connection) =>
      this.#agreements.change(connection, "strategy", before, { value, next }),
    );
    if (now) return now;
    throw new StrategyError("Somebody else is changing how locks are kept here: what they do counts.");
  }

  async run(
    before: Agreed,
    from: Strategy,
    to: Strategy,
    { wait, signal }: { readonly wait: number; readonly signal: AbortSignal | undefined },
  ): Promise<void> {
    const announced = await this.write(before, from, to);
    try {
      await sleep(trustMs + marginMs, signal);
      const until = performance.now() + wait;
      for (;;) {
        const holders = await this.#on((connection) => this.#agreements.holders(connection, from));
        if (holders.length === 0) break;
        if (performance.now() >= until) throw inTheWay(holders, from, to);
        await sleep(lookMs, signal);
      }
      await this.write(announced, to);
    } catch (error) {
      await this.write(announced, from).catch(() => {});
      throw error;
    }
  }
}

function inTheWay(holders: readonly Holder[], from: Strategy, to: Strategy): StrategyError {
  const shown = holders.slice(0, named).map(({ pid, application, state }) => {
    const name = application === "" ? "" : ` (${application})`;
    return `${pid}${name}, ${state}`;
  });
  const more = holders.length > named ? ` and ${holders.length - named} more` : "";
  return new StrategyError(
    `Locks stay "${from}", for they are held: by sessions ${shown.join("; ")}${more}. Whoever gets one of "${to}" would not exclude them. ` +
      "Stop them (workers of queues and leaders keep locks as long as they live), then try again.",
    true,
  );
}
