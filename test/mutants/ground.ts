/** What a trial stands on: a database of its own, and everything in it that is opened through this is closed afterwards. */
import { type Holdfast, type HoldfastOptions, holdfast } from "holdfast";
import { fromPg } from "holdfast/pg";
import { type History, type Model, checkHistory } from "holdfast/testing";
import { Pool, type PoolClient } from "pg";
import { type Proxy, startProxy } from "../harness/proxy.ts";

/** A promise of the library is broken. Whatever else is thrown is a fault of the trial, and kills nobody. */
export class Broken extends Error {}

export function promised(kept: boolean, otherwise: string): asserts kept {
  if (!kept) throw new Broken(otherwise);
}

/** Of a call that must succeed. */
export async function succeeds<T>(call: Promise<T>, what: string): Promise<T> {
  try {
    return await call;
  } catch (error) {
    const { code, message } = error as { code?: string; message?: string };
    throw new Broken(`${what}: ${code ?? ""} ${message ?? String(error)}`, { cause: error });
  }
}

/** Of a call that must be refused with that code. */
export async function refused(call: Promise<unknown>, code: string, what: string): Promise<void> {
  const thrown: unknown = await call.then(
    () => undefined,
    (error: unknown) => error,
  );
  const found = (thrown as { code?: unknown } | undefined)?.code;
  promised(found === code, `${what}: it was not refused with ${code}, but ${String(thrown ?? "returned")}`);
}

export function explained(history: History, model: Model<any>): void {
  const { verdict, text } = checkHistory(history, model);
  if (verdict === "unknown") throw new Error(text);
  promised(verdict === "ok", text);
}

export class Ground {
  readonly url: string;
  readonly pool: Pool;
  readonly #closing: (() => unknown)[] = [];

  constructor(url: string) {
    this.url = url;
    this.pool = this.#open(url);
  }

  #open(url: string, max = 12): Pool {
    const pool = new Pool({ connectionString: url, max });
    pool.on("error", () => {});
    this.#closing.push(() => pool.end());
    return pool;
  }

  /** An instance with a pool of its own, as another process would have. */
  instance(options: HoldfastOptions = {}, url = this.url): Holdfast<PoolClient> {
    return this.on(this.#open(url), options);
  }

  on(pool: Pool, options: HoldfastOptions = {}): Holdfast<PoolClient> {
    const hf = holdfast(fromPg(pool), { wait: 20_000, deadline: 30_000, ...options });
    this.#closing.push(() => hf.close());
    return hf;
  }

  async proxy(): Promise<Proxy> {
    const proxy = await startProxy({ port: Number(new URL(this.url).port) });
    this.#closing.push(() => proxy.close());
    return proxy;
  }

  later(close: () => unknown): void {
    this.#closing.push(close);
  }

  async ask(text: string, values: readonly unknown[] = []): Promise<Record<string, unknown>[]> {
    return (await this.pool.query(text, [...values])).rows as Record<string, unknown>[];
  }

  async number(text: string): Promise<number> {
    return Number(Object.values((await this.ask(text))[0] ?? {})[0]);
  }

  async close(): Promise<void> {
    for (const close of this.#closing.toReversed()) await Promise.resolve(close()).catch(() => {});
  }
}
