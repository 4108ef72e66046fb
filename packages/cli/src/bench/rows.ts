/** A row that is read, decided upon and written: 1 taken from a balance, or moved to another one. */
import { type Holdfast, holdfast, sql, versioned } from "holdfast";
import { fromMysql2 } from "holdfast/mysql2";
import { fromPg } from "holdfast/pg";
import type { ClientBase, Pool, PoolClient } from "pg";
import { type Send, byMysql, mysqlTransaction, transaction } from "./locks.ts";
import { scatter } from "./measure.ts";
import type { MysqlPlace, PostgresPlace } from "./place.ts";
import { type Opened, type Suite, type Trial, alternating, byHand, naive, ours, untilDone } from "./suite.ts";

export const balance = 1_000_000_000;

export const table =
  "CREATE TABLE account (id bigint PRIMARY KEY, owner text NOT NULL, balance int NOT NULL, version int NOT NULL DEFAULT 0)";

export interface Account {
  id: string;
  owner: string;
  balance: number;
  version: number;
}

/** The pool that all contestants of a cell share, and what is made of it. */
export interface Ground {
  readonly pool: Pool;
  readonly hf: Holdfast<PoolClient>;
}

export function groundOn(pool: Pool): Ground {
  return { pool, hf: holdfast(fromPg(pool), { oneShard: true }) };
}

/** One operation: takes 1 from a row. A transfer gives it to another one. */
export type Operation = (ground: Ground) => (id: number, other: number) => Promise<void>;

/** Decided in the application, as a row is locked for nothing else. */
function less({ balance: now }: Account, amount = 1): number {
  if (now < amount) throw new Error("The balance was not to be used up");
  return now - amount;
}

const setBalance = "UPDATE account SET balance = $2 WHERE id = $1";
const move =
  "UPDATE account SET balance = balance + CASE id WHEN $1 THEN -1 ELSE 1 END WHERE id = $1 OR id = $2";

/** What most people write. It waits for ever. */
function inTransaction(body: (client: ClientBase, id: number, other: number) => Promise<void>): Operation {
  return ({ pool }) =>
    (id, other) =>
      transaction(pool, (client) => body(client, id, other));
}

/** A wait that ends, and a timeout that does not go on to apply to what follows: two round trips more. */
function patiently<T>(select: (client: ClientBase) => Promise<T>): (client: ClientBase) => Promise<T> {
  return async (client) => {
    await client.query("SET LOCAL lock_timeout = '5s'");
    const result = await select(client);
    await client.query("SET LOCAL lock_timeout = DEFAULT");
    return result;
  };
}

const selectOne =
  (id: number, lock = " FOR UPDATE") =>
  async (client: Pick<ClientBase, "query">) =>
    (await client.query<Account>(`SELECT * FROM account WHERE id = $1${lock}`, [id])).rows[0] as Account;

const selectTwo = (ids: number[]) => async (client: ClientBase) =>
  (await client.query<Account>("SELECT * FROM account WHERE id = ANY ($1) ORDER BY id FOR UPDATE", [ids]))
    .rows;

/** Rows come in the order of their ids there, and in the order of the call with Holdfast. */
function payer(found: readonly Account[], id: number): Account {
  return found.find((row) => Number(row.id) === id) as Account;
}

function byVersions(hf: Holdfast<unknown>): (id: number) => Promise<void> {
  // Nobody is to give up: who reads in vain is a matter of the time it takes.
  const accounts = versioned<Account>(hf, "account", { attempts: 100_000 });
  return async (id) => void (await accounts.update(id, (row) => ({ balance: less(row) })));
}

const versions: Operation = ({ hf }) => byVersions(hf);

export const oneRow = {
  holdfast:
    ({ hf }) =>
    (id) =>
      hf.transaction(async (tx) => {
        const row = await tx.row<Account>("account", id);
        await tx.client.query(setBalance, [id, less(row)]);
      }),
  "by hand": inTransaction(async (client, id) => {
    const row = await selectOne(id)(client);
    await client.query(setBalance, [id, less(row)]);
  }),
  careful: inTransaction(async (client, id) => {
    const row = await patiently(selectOne(id))(client);
    await client.query(setBalance, [id, less(row)]);
  }),
} satisfies Readonly<Record<string, Operation>>;

export const twoRows = {
  holdfast:
    ({ hf }) =>
    (id, other) =>
      hf.transaction(async (tx) => {
        const found = await tx.rows<Account>("account", [id, other]);
        less(payer(found, id));
        await tx.client.query(move, [id, other]);
      }),
  "by hand": inTransaction(async (client, id, other) => {
    const found = await selectTwo([id, other])(client);
    less(payer(found, id));
    await client.query(move, [id, other]);
  }),
  careful: inTransaction(async (client, id, other) => {
    const found = await patiently(selectTwo([id, other]))(client);
    less(payer(found, id));
    await client.query(move, [id, other]);
  }),
} satisfies Readonly<Record<string, Operation>>;

export const choice = {
  versioned: versions,
  pessimistic: oneRow.holdfast,
  // For comparison: where the whole check fits into the statement, nothing else is needed.
  conditional:
    ({ pool }) =>
    async (id) =>
      void (await pool.query("UPDATE account SET balance = balance - 1 WHERE id = $1 AND balance >= 1", [
        id,
      ])),
} satisfies Readonly<Record<string, Operation>>;

/** Of two rows, no two the same. */
export function idsOf(turn: number, rows: number): [id: number, other: number] {
  const id = Math.floor(scatter(turn) * rows);
  const other = (id + 1 + Math.floor(scatter(turn + 1_000_000) * (rows - 1))) % rows;
  return [id + 1, other + 1];
}

export async function fill(admin: Pick<ClientBase, "query">, rows: number): Promise<void> {
  await admin.query("TRUNCATE account");
  await admin.query(
    "INSERT INTO account SELECT i, 'owner of ' || i, $2::int FROM generate_series(1, $1::int) i",
    [rows, balance],
  );
  await admin.query("ANALYZE account");
}

/** What was taken from all of them. */
export async function missing(admin: Pick<ClientBase, "query">): Promise<number> {
  const { rows } = await admin.query<{ missing: string | null }>(
    "SELECT sum($1::bigint - balance) AS missing FROM account",
    [balance],
  );
  return Number(rows[0]?.missing ?? 0);
}

/** Read and written, one after the other, and nothing in between that would notice somebody else. */
const unlocked: Operation =
  ({ pool }) =>
  async (id) => {
    const row = await selectOne(id, "")(pool);
    await pool.query(setBalance, [id, less(row)]);
  };

const byVersion = "versioned";
const operations: Readonly<Record<string, Operation>> = {
  [naive]: unlocked,
  [byHand]: oneRow["by hand"],
  [ours]: oneRow.holdfast,
  [byVersion]: versions,
};

const many = 1000;
const takenInTrial = 200;

async function onPostgres({ pool: make, connections }: PostgresPlace): Promise<Opened> {
  const ground = groundOn(make());
  const { pool, hf } = ground;
  await pool.query(table);
  return open({
    connections,
    calls: Object.entries(operations).map(([name, operation]) => [name, operation(ground)]),
    fill: (count) => fill(pool, count),
    missing: () => missing(pool),
    async close() {
      await hf.close();
      await pool.end();
    },
  });
}

async function onMysql({ pool: make, connections }: MysqlPlace): Promise<Opened> {
  const pool = make();
  const hf = holdfast(fromMysql2(pool));
  await pool.query(table.replace("owner text", "owner varchar(40)"));
  const written = (send: Send, id: number, left: number) =>
    send("UPDATE account SET balance = ? WHERE id = ?", [left, id]);
  const selected = async (send: Send, id: number, lock = "") =>
    (await send(`SELECT * FROM account WHERE id = ?${lock}`, [id]))[0] as unknown as Account;
  return open({
    connections,
    calls: Object.entries<(id: number) => Promise<unknown>>({
      async [naive](id) {
        const send = byMysql(pool);
        await written(send, id, less(await selected(send, id)));
      },
      [byHand]: (id) =>
        mysqlTransaction(pool, async (send) =>
          written(send, id, less(await selected(send, id, " FOR UPDATE"))),
        ),
      [ours]: (id) =>
        hf.transaction(async (tx) => {
          const row = await tx.row<Account>("account", id);
          await tx.query(sql`UPDATE account SET balance = ${less(row)} WHERE id = ${id}`);
        }),
      [byVersion]: byVersions(hf),
    }),
    async fill(count) {
      await pool.query("TRUNCATE account");
      await pool.query("INSERT INTO account (id, owner, balance) VALUES ?", [
        Array.from({ length: count }, (_, i) => [i + 1, `owner of ${i + 1}`, balance]),
      ]);
    },
    async missing() {
      const [row] = await byMysql(pool)("SELECT sum(? - balance) AS missing FROM account", [balance]);
      return Number(row?.["missing"] ?? 0);
    },
    async close() {
      await hf.close();
      await pool.end();
    },
  });
}

interface Field {
  readonly connections: number;
  readonly calls: readonly (readonly [name: string, call: (id: number, other: number) => Promise<unknown>])[];
  /** So many rows, and nothing taken from them. */
  fill(count: number): Promise<void>;
  /** What was taken from all of them. */
  missing(): Promise<number>;
  close(): Promise<void>;
}

function open({ connections, calls, fill: filled, missing: taken, close }: Field): Opened {
  const cell = (name: string, ids: (turn: number) => [number, number]) =>
    alternating(name, {
      contestants: calls.map(([contestant, call]) => ({
        name: contestant,
        call: async (turn) => void (await call(...ids(turn))),
      })),
      callers: connections,
      reset: () => filled(many),
    });
  return {
    cells: [cell("1,000 rows", (turn) => idsOf(turn, many)), cell("one hot row", () => [1, 2])],
    trials: Object.fromEntries(
      calls.map(([name, call]) => [
        name,
        async ({ ms, signal }): Promise<Trial> => {
          await filled(1);
          let started = 0;
          const since = performance.now();
          const caller = async (): Promise<void> => {
            while (started < takenInTrial && performance.now() - since < ms) {
              started++;
              await untilDone(() => call(1, 2), signal);
              signal?.throwIfAborted();
            }
          };
          await Promise.all(Array.from({ length: connections }, caller));
          const counted = await taken();
          const text = counted === started ? "exact" : `${started - counted} of ${started} lost`;
          return { expected: started, counted, text };
        },
      ]),
    ),
    [Symbol.asyncDispose]: close,
  };
}

export const rows: Suite = {
  name: "rows",
  about: "1 taken from a balance: read the row, decide, write it back",
  contestants: {
    [naive]: "SELECT, then UPDATE with what was computed",
    [byHand]: "BEGIN, SELECT … FOR UPDATE (which waits for ever), UPDATE, COMMIT",
    [ours]: "tx.row(table, id) in hf.transaction, with a deadline and retries",
    [byVersion]: "versioned(hf, table).update(id, …): no lock, again if somebody was faster",
  },
  own: [ours, byVersion],
  needsDatabase: false,
  measured: 8,
  // From the lock to COMMIT: 3 and 3; a version that somebody else has changed is read and written again.
  inLine: (connections) => 10 * connections,
  postgres: onPostgres,
  mysql: onMysql,
};
