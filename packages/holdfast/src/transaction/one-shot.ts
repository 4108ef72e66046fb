import type { WrongConnectionGuard } from "./wrong-connection.ts";
import type { Capabilities } from "../seam/capabilities.ts";
import type { Connection, Database, Purpose } from "../seam/database.ts";
import { HoldfastError, NoConnectionError } from "../seam/errors.ts";
import { classify, explained } from "../seam/failure.ts";
import { runInClient } from "./client-transaction.ts";
import { findRights } from "./rights.ts";
import { Cancelling, Silence, graceMs, within } from "../waiting/interrupt.ts";
import { isOpaque } from "../seam/thrown.ts";

export const oneShotMs = 10_000;

/** The isolation of what is sent by itself. */
const ours = "read committed";

/** What a one-shot statement can be told besides how long it may take. */
export interface OneShotOptions {
  /** Ends it on the server. It rejects with {@link OneShotEnded} only if nothing of it was kept. */
  readonly signal?: AbortSignal | undefined;
  /** Called before anything that may be kept is on its way. */
  readonly sent?: (() => void) | undefined;
  /** When its time is over, it is worth waiting for what the server says of the end: else nobody is known to have ended it. */
  readonly certain?: boolean;
}

/** It was ended before it had done anything, since its time was over or its signal aborted: nothing of it was kept. */
export class OneShotEnded extends Error {
  readonly why: "late" | "aborted";

  constructor(why: "late" | "aborted", cause: unknown) {
    super(why === "late" ? "it took too long, and was ended on the server" : "it was aborted", { cause });
    this.why = why;
  }
}

/** Who sends it. */
interface Sender<Native, C extends Connection> {
  readonly database: Database<Native, C>;
  readonly wrongConnection?: WrongConnectionGuard;
  /** An instance asks once what is at the other end, before anything else: it may have to be refused. */
  known?(): Capabilities | undefined;
  capabilities?(connection: NoInfer<C>, free: boolean): Promise<Capabilities>;
}

/** Databases whose reads are known to come from the server itself. */
const verified = new WeakSet<object>();

/** Throws if a statement outside of a transaction may be answered by a cache. Found out once, on a connection that is in none. */
export async function verifyReads<C extends Connection>(
  database: Pick<Database<unknown, C>, "engine">,
  connection: C,
  capabilities: Pick<Capabilities, "details">,
): Promise<void> {
  if (verified.has(database)) return;
  await database.engine.verifyReads?.(connection, capabilities);
  verified.add(database);
}

/** A short piece of work on any connection, inside no transaction of ours. */
export function withConnection<Native, C extends Connection, T>(
  sender: Sender<Native, C>,
  work: (connection: C) => Promise<T>,
  ms = oneShotMs,
  options: OneShotOptions = {},
): Promise<T> {
  const { database, wrongConnection } = sender;
  // A client that hands out no connection runs it in a transaction of its own.
  const free = database.connect !== undefined;
  const ask = sender.known?.() ? undefined : sender.capabilities?.bind(sender);
  const asking = ask && ((connection: C) => ask(connection, free));
  const isInherited = (sender.known?.()?.defaultIsolation ?? ours) === ours;
  const { engine } = database;
  let asked = false;
  const settled = (connection: C) => {
    asked = true;
    const capabilities = free ? sender.known?.() : undefined;
    const run = () => work(connection);
    const settle = () =>
      capabilities && engine.withSettings ? engine.withSettings(connection, capabilities, run) : run();
    // It may be known from inside of a transaction.
    if (!capabilities || verified.has(database)) return settle();
    return verifyReads(database, connection, capabilities).then(settle);
  };
  const run = () =>
    onConnection(database, { work: settled, asking, isInherited }, ms, options).catch(
      async (error: unknown) => {
        // Not if it could not sign in: another try would end in the same way.
        if (asked)
          await findRights(database, error, (question) =>
            onConnection(database, { work: question, asking: undefined, isInherited }, graceMs, {}),
          );
        throw explained(database, error);
      },
    );
  return wrongConnection ? wrongConnection.ours(run) : run();
}

interface OneShot<C extends Connection, T> {
  readonly work: (connection: C) => Promise<T>;
  readonly asking: ((connection: C) => Promise<unknown>) | undefined;
  /** Sessions begin at the isolation that is wanted, as far as is known. */
  readonly isInherited: boolean;
}

async function onConnection<Native, C extends Connection, T>(
  database: Database<Native, C>,
  { work, asking, isInherited }: OneShot<C, T>,
  ms: number,
  { signal: caller, sent, certain = false }: OneShotOptions,
): Promise<T> {
  if (caller?.aborted) throw new OneShotEnded("aborted", caller.reason);
  // Not AbortSignal.timeout, whose timer would outlive the work: thousands of them at a thousand calls a second.
  const patience = new AbortController();
  const { signal } = patience;
  const giveUp = () => patience.abort();
  const timer = setTimeout(giveUp, oneShotMs);
  caller?.addEventListener("abort", giveUp, { once: true });
  const got = () => {
    clearTimeout(timer);
    caller?.removeEventListener("abort", giveUp);
  };
  const refused = (error: unknown) => {
    if (error === signal.reason)
      return caller?.aborted ? new OneShotEnded("aborted", caller.reason) : new NoConnectionError(oneShotMs);
    return error;
  };
  const purpose: Purpose = { use: "session", locks: [], wait: 5000, signal };
  if (database.connect) {
    const pinned = await database
      .connect(purpose)
      .catch((error: unknown) => {
        throw notConnected(database, refused(error));
      })
      .finally(got);
    const { connection } = pinned;
    let broken = false;
    const send = () => {
      sent?.();
      return work(connection);
    };
    try {
      return await answered(database, connection, asking ? asking(connection).then(send) : send(), {
        ms,
        signal: caller,
        certain,
        onSilence: () => (broken = true),
      });
    } finally {
      // A client that cannot throw a connection away gives it back when the server has answered, which may be never.
      const released = Promise.resolve(pinned.release(broken || connection.lost.aborted));
      await within(graceMs, released).catch(() => {});
    }
  }
  const endsAt = performance.now() + ms;
  let entered = false;
  return runInClient(
    database,
    {
      use: "session",
      locks: [],
      wait: 5000,
      isolation: ours,
      readOnly: false,
      deadlineMs: ms,
      isolationIsDefault: isInherited,
    },
    { signal, leftMs: () => Math.max(0, endsAt - performance.now()) },
    async ({ connection }) => {
      entered = true;
      got();
      // What throws here is rolled back by the client.
      const terms = { ms, signal: caller, certain, rolledBack: true, onSilence: () => {} };
      const running = asking ? asking(connection).then(() => work(connection)) : work(connection);
      const value = await answered(database, connection, running, terms);
      sent?.();
      return value;
    },
  )
    .catch((error: unknown) => {
      throw entered ? refused(error) : notConnected(database, refused(error));
    })
    .finally(got);
}

/** In words of the client's own, such as those of a pool that was closed. */
export function notConnected(source: Pick<Database, "engine" | "unwrap">, error: unknown): unknown {
  const ours = isOpaque(error) || error instanceof HoldfastError || error instanceof OneShotEnded;
  return ours || classify(source, error) || explained(source, error) !== error
    ? error
    : NoConnectionError.refused(error, false);
}

interface Answering {
  readonly ms: number;
  readonly signal: AbortSignal | undefined;
  readonly certain: boolean;
  /** Whoever throws has it rolled back, also where it cannot be cancelled. */
  readonly rolledBack?: boolean;
  /** There was no word, or the cancel request may still be under way: the connection must not be used again. */
  readonly onSilence: () => void;
}

/**
 * What the server says, if it says so in time and nobody aborts. Then the statement is cancelled, and it is still the server's
 * word that counts: who is told that it was ended can rely on that nothing was kept.
 */
async function answered<T>(
  database: Pick<Database, "engine" | "unwrap">,
  connection: Connection,
  running: Promise<T>,
  { ms, signal, certain, rolledBack = false, onSilence }: Answering,
): Promise<T> {
  const stopped = Promise.withResolvers<"late" | "aborted">();
  const onAbort = () => stopped.resolve("aborted");
  const timer = setTimeout(() => stopped.resolve("late"), ms);
  // Nobody could end it, nor undo it: its answer is waited for.
  const heeded = connection.cancel || rolledBack ? signal : undefined;
  heeded?.addEventListener("abort", onAbort, { once: true });
  if (heeded?.aborted) onAbort();
  const settled = () => undefined;
  const why = await Promise.race([stopped.promise, running.then(settled, settled)]);
  clearTimeout(timer);
  heeded?.removeEventListener("abort", onAbort);
  if (why === undefined) return running;
  // Again and again: between two statements, or before the first one, there is nothing to end yet.
  const cancelling = connection.cancel && new Cancelling(connection);
  if (why === "late" && !certain) {
    running.catch(() => {});
    cancelling?.end().catch(() => {});
    onSilence();
    throw new Silence();
  }
  try {
    if (!cancelling) throw rolledBack ? new OneShotEnded(why, signal?.reason) : new Silence();
    return await within(graceMs, running);
  } catch (error) {
    running.catch(() => {});
    if (error instanceof Silence) onSilence();
    throw classify(database, error) === "canceled" ? new OneShotEnded(why, error) : error;
  } finally {
    await cancelling?.end().catch(onSilence);
  }
}
