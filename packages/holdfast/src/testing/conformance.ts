/**
 * What every engine and every client must do, on a real server. Each case runs where the capabilities say that it
 * can, and asserts the refusal where they say that it cannot: a promise is kept or refused, never forgotten.
 *
 *     for (const { suite, name, run } of conformance(backend)) test(`${suite}: ${name}`, () => run(site));
 */
import type { Connection, Database } from "../core/database.ts";
import type { Capabilities } from "../core/capabilities.ts";
import { type Holdfast, holdfast } from "../holdfast.ts";
import { abortCases } from "./cases/abort.ts";
import { joinCases } from "./cases/join.ts";
import { lockCases } from "./cases/lock.ts";
import { sessionCases } from "./cases/session.ts";
import { transactionCases } from "./cases/transaction.ts";

/** One way to reach one kind of server. */
export interface ConformanceBackend<Native = unknown> {
  readonly name: string;
  /** Opened twice per run: two clients of one database, as two processes would have (or one, if there can be only one). */
  open(): Promise<ConformanceSite<Native>>;
}

export interface ConformanceSite<Native = unknown> {
  readonly database: Database<Native, Connection>;
  /** Runs a body in a transaction that the client opens and ends without Holdfast. */
  ownTransaction<T>(body: (native: Native) => Promise<T>): Promise<T>;
  /** Runs a body with a client that is in no transaction. */
  withIdle<T>(body: (native: Native) => Promise<T>): Promise<T>;
  close(): Promise<void>;
}

/** What a case works with. */
export interface Ground {
  readonly hf: Holdfast<unknown>;
  /** Another instance on the same database. */
  readonly other: Holdfast<unknown>;
  readonly site: ConformanceSite;
  readonly capabilities: Capabilities;
  /** A name that no other case uses. */
  readonly fresh: string;
}

export interface ConformanceCase {
  readonly suite: string;
  readonly name: string;
  run(ground: Ground): Promise<void>;
}

/** The two sites of one backend, ready for cases. */
export async function prepare(
  one: ConformanceSite,
  two: ConformanceSite,
): Promise<(name: string) => Promise<Ground>> {
  const [hf, other] = [holdfast(one.database), holdfast(two.database)];
  await Promise.all([hf.migrate(), other.migrate()]);
  const capabilities = await hf.capabilities();
  let count = 0;
  return async (name) => ({ hf, other, site: one, capabilities, fresh: `${name}-${++count}-${process.pid}` });
}

export function conformance(): ConformanceCase[] {
  return [...transactionCases, ...lockCases, ...joinCases, ...abortCases, ...sessionCases];
}
