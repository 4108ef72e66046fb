import { apart } from "../../context/inside.ts";
import type { Connection, Pinned, SessionLocks } from "../../seam/database.ts";
import type { LockRequest } from "../../seam/key.ts";
import { within } from "../../waiting/interrupt.ts";
import { Turns } from "../../waiting/turns.ts";
import { answered } from "./connect.ts";

const heartbeatMs = 5000;

/** A connection that holds locks, perhaps of several callers. It is given back with the last of them. */
export class Member<Native, C extends Connection> {
  readonly #pinned: Pinned<Native, C>;
  readonly #locks: SessionLocks<C>;
  /** All of the instance, this one included for as long as it can be used. */
  readonly #members: Set<Member<Native, C>>;
  /** Statements on it, one at a time. */
  readonly #queue = new Turns();
  /** Ids of those that it holds, or is asked for. */
  readonly #keys: Set<string>;
  /** Those to be told when it is lost. */
  readonly #losers = new Set<(cause: unknown) => void>();
  readonly #timer: NodeJS.Timeout;
  readonly #onLost = () => void this.lose(this.connection.lost.reason);

  /** `requests`: those that it holds. */
  constructor(
    pinned: Pinned<Native, C>,
    locks: SessionLocks<C>,
    requests: readonly LockRequest[],
    members: Set<Member<Native, C>>,
  ) {
    this.#pinned = pinned;
    this.#locks = locks;
    this.#keys = new Set(requests.map(({ key }) => key.id));
    this.#members = members;
    // It goes on after whatever transaction the lock is asked for in.
    this.#timer = apart(() => setInterval(() => void this.#beat(), heartbeatMs)).unref();
    this.connection.lost.addEventListener("abort", this.#onLost, { once: true });
    members.add(this);
  }

  get connection(): C {
    return this.#pinned.connection;
  }

  get isLost(): boolean {
    return this.connection.lost.aborted;
  }

  /** Whether it is asked for none of them. */
  hasNone(requests: readonly LockRequest[]): boolean {
    return requests.every(({ key }) => !this.#keys.has(key.id));
  }

  /** It is asked for them. */
  mark(requests: readonly LockRequest[]): void {
    for (const { key } of requests) this.#keys.add(key.id);
  }

  forget(requests: readonly LockRequest[]): void {
    for (const { key } of requests) this.#keys.delete(key.id);
    if (this.#keys.size === 0) void this.#retire(this.isLost);
  }

  /** In its turn. */
  run<T>(work: (connection: C) => Promise<T>): Promise<T> {
    return this.#queue.run(() => work(this.connection));
  }

  /** The same for one statement, whose answer must come in time. */
  ask<T>(statement: (connection: C) => Promise<T>, signal?: AbortSignal): Promise<T> {
    return this.#queue.run(() => answered(this.connection, statement(this.connection)), signal);
  }

  /** Gives back what it may hold of these, and is not wanted any more. */
  async clear(requests: readonly LockRequest[]): Promise<void> {
    await this.ask((connection) => this.#locks.clear(connection, requests)).catch((error: unknown) =>
      this.lose(error),
    );
  }

  /** `lose` is called when it is lost. Returns what forgets that. */
  onLost(lose: (cause: unknown) => void): () => void {
    this.#losers.add(lose);
    if (this.isLost) lose(this.connection.lost.reason);
    return () => this.#losers.delete(lose);
  }

  async lose(cause: unknown): Promise<void> {
    // Whoever is told goes on by itself, and not in what its connection was opened in.
    apart(() => {
      for (const lose of this.#losers) lose(cause);
    });
    await this.#retire(true);
  }

  /** A cable pulled out says nothing: only a statement that is not answered shows it. */
  async #beat(): Promise<void> {
    const ping = () => answered(this.connection, this.#locks.ping(this.connection), heartbeatMs);
    try {
      await within(heartbeatMs, this.#queue.run(ping));
    } catch (error) {
      await this.lose(error);
    }
  }

  async #retire(broken: boolean): Promise<void> {
    if (!this.#members.delete(this)) return;
    clearInterval(this.#timer);
    this.connection.lost.removeEventListener("abort", this.#onLost);
    await this.#pinned.release(broken);
  }
}
