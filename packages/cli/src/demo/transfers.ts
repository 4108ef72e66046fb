import type { Holdfast } from "holdfast";
import type { ClientBase, Pool } from "pg";
import {
  type Race,
  Refused,
  type Size,
  byHand,
  callers,
  failureText,
  failures,
  one,
  sentence,
  work,
} from "./race.ts";

interface Account {
  readonly id: number;
  readonly balance: number;
}

/** Few: each deadlock takes a second, which is how long the server waits before it looks for one. */
const each = 4;
const amount = 10;
const opening = 1000;

const pairs = ({ processes, callers: own }: Size): number => Math.max(1, Math.floor((processes * own) / 2));
const total = ({ processes, callers: own }: Size): number => processes * own * each;

/** Two callers, of two processes where there are several, send to each other. */
function route(caller: number, size: Size): { from: number; to: number } {
  const pair = caller % pairs(size);
  const [a, b] = [2 * pair + 1, 2 * pair + 2];
  return Math.floor(caller / pairs(size)) % 2 === 0 ? { from: a, to: b } : { from: b, to: a };
}

const lockAccount = (client: ClientBase, id: number): Promise<Account> =>
  one<Account>(client, "SELECT id, balance FROM account WHERE id = $1 FOR UPDATE", [id]);

async function move(client: ClientBase, from: number, to: number): Promise<void> {
  await client.query("UPDATE account SET balance = balance - $2 WHERE id = $1", [from, amount]);
  await client.query("UPDATE account SET balance = balance + $2 WHERE id = $1", [to, amount]);
  await client.query("INSERT INTO transfer (payer, payee) VALUES ($1, $2)", [from, to]);
}

const naive = (pool: Pool, from: number, to: number): Promise<void> =>
  byHand(pool, async (client) => {
    const payer = await lockAccount(client, from);
    if (payer.balance < amount) throw new Refused();
    await work();
    await lockAccount(client, to);
    await move(client, from, to);
  });

const exact = (hf: Holdfast<ClientBase>, from: number, to: number): Promise<void> =>
  hf.transaction(async (tx) => {
    const [payer] = await tx.rows<Account>("account", [from, to]);
    if (!payer || payer.balance < amount) throw new Refused();
    await work();
    await move(tx.client, from, to);
  });

export const transfers: Race = {
  name: "transfers",
  title: "Transfers that deadlock",
  what: (size) =>
    `${pairs(size)} pairs of people send each other money at the same moment. The code locks the account of the payer, then that of the payee (SELECT … FOR UPDATE), and moves the money.`,
  counts: "transfers",
  total,
  does: "calls",
  timed: true,
  shared: false,
  tables: `
    CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL);
    CREATE TABLE transfer (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payer int NOT NULL, payee int NOT NULL)`,
  async reset({ pool }, _, size) {
    await pool.query("TRUNCATE account, transfer");
    await pool.query("INSERT INTO account (id, balance) SELECT n, $2 FROM generate_series(1, $1::int) AS n", [
      2 * pairs(size),
      opening,
    ]);
  },
  ways: [
    {
      name: "naive",
      code: [
        "const payer = await lockAccount(client, from);",
        "await lockAccount(client, to);",
        "await move(client, from, to);",
      ],
      why: "Each has the account that the other one waits for. After a second the server ends one of them.",
      run: (stage) =>
        callers(stage, each, (caller) => {
          const { from, to } = route(caller, stage.setting);
          return naive(stage.pool, from, to);
        }),
    },
    {
      name: "Holdfast rows",
      code: [
        'const [payer] = await tx.rows<Account>("account", [from, to]);',
        "await move(tx.client, from, to);",
      ],
      why: "Rows are locked in one order, whatever order they are asked for in.",
      run: (stage) =>
        callers(stage, each, (caller) => {
          const { from, to } = route(caller, stage.setting);
          return exact(stage.hf, from, to);
        }),
    },
  ],
  async find({ pool }, _, tally, size) {
    const { counted } = await one<{ counted: number }>(pool, "SELECT count(*)::int AS counted FROM transfer");
    const { money } = await one<{ money: number }>(
      pool,
      "SELECT coalesce(sum(balance), 0)::int AS money FROM account",
    );
    const expected = total(size);
    const due = 2 * pairs(size) * opening;
    // Holdfast would try a transaction again that was ended by a deadlock: it counts all the same.
    const deadlocks = (tally.failed["40P01"] ?? 0) + tally.retried;
    const { "40P01": _ended, ...failed } = tally.failed;
    return {
      counted,
      expected,
      right: counted === expected && deadlocks === 0 && money === due && failures(tally) === 0,
      text: sentence(
        `${counted} transfers of ${expected}`,
        deadlocks > 0 && `${deadlocks} deadlocks`,
        deadlocks === 0 && "no deadlock",
        money !== due && `${money} in the accounts instead of ${due}`,
        failureText({ ...tally, failed }),
      ),
      facts: { deadlocks, money, moneyDue: due },
    };
  },
};
