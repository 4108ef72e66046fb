/** Nothing that the doctor asks may keep it, or the server, for long. */
import type { Server, Session } from "../server.ts";
import { within } from "../within.ts";

/** Of one statement, on the server. */
export const statementMs = 5_000;
/** Of a wait for a lock, on the server. */
export const lockMs = 2_000;
/** Of a whole check, here: a pooler without a free connection, or a frozen server, never answers. */
export const checkMs = 30_000;
/** Of one statement, here: of an experiment, and after a check that got no answer. */
export const answerMs = 10_000;

/** A session of its own, for an experiment: a pooler may have none to lend to it. */
export async function sessionWithin(server: Pick<Server, "session">): Promise<Session> {
  const session = await within(answerMs, server.session());
  return { ...session, query: (text, values) => within(answerMs, session.query(text, values)) };
}

/** Computed when it is first asked for. */
export function lazy<T>(make: () => Promise<T>): () => Promise<T> {
  let made: Promise<T> | undefined;
  return () => (made ??= make());
}
