import { Pool, type PoolClient } from "pg";

/** What does not get through: the statement, or the answer to it, after it was carried out. */
export type Loss = "statement" | "answer";

/** A pool whose connections break at the statements that a test names. */
export interface LossyPool {
  readonly pool: Pool;
  /** Breaks the connection at the next statements with this in their text, once unless told otherwise. */
  lose(pattern: RegExp, what: Loss, options?: { readonly times?: number; readonly skip?: number }): void;
  /** No more of it. */
  mend(): void;
  /** How many were lost so far. */
  readonly lost: number;
  /** How many statements with this in their text were given to a client, the lost ones among them. */
  count(pattern: RegExp): number;
}

interface Innards {
  readonly connection: { readonly stream: { destroy(): void } };
}

type Query = (...args: unknown[]) => Promise<unknown>;

export function lossyPool(connectionString: string, max = 20): LossyPool {
  const pool = new Pool({ connectionString, max });
  const texts: string[] = [];
  let lost = 0;
  let trap: { pattern: RegExp; what: Loss; times: number; skip: number } | undefined;
  pool.on("error", () => {});
  pool.on("connect", (client) => {
    const send = client.query.bind(client) as unknown as Query;
    const query = (...args: unknown[]): Promise<unknown> => {
      const text = textOf(args);
      texts.push(text);
      if (!trap?.pattern.test(text) || trap.skip-- > 0) return send(...args);
      const { what } = trap;
      if (--trap.times < 1) trap = undefined;
      lost++;
      return what === "statement" ? broken(client) : send(...args).then(() => broken(client));
    };
    client.query = query as never;
  });
  return {
    pool,
    lose(pattern, what, { times = 1, skip = 0 } = {}) {
      trap = { pattern, what, times, skip };
    },
    mend() {
      trap = undefined;
    },
    get lost() {
      return lost;
    },
    count: (pattern) => texts.filter((text) => pattern.test(text)).length,
  };
}

/** Of a statement that a routine runs: that one's. */
function textOf([first, second]: readonly unknown[]): string {
  const { text = "", values } = (
    typeof first === "string" ? { text: first, values: second } : (first ?? {})
  ) as {
    readonly text?: string;
    readonly values?: readonly unknown[];
  };
  return text.includes("run_statement") ? String(values?.[0]) : text;
}

async function broken(client: PoolClient): Promise<never> {
  const ended = new Promise<void>((resolve) => client.once("end", resolve));
  (client as unknown as Innards).connection.stream.destroy();
  await ended;
  throw Object.assign(new Error("read ECONNRESET"), { code: "ECONNRESET" });
}
