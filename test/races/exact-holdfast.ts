/** Flows without a race, by what this library is for. */
import assert from "node:assert/strict";
import { holdfast, key, once, versioned } from "holdfast";
import { fromKnex } from "holdfast/knex";
import { fromPg } from "holdfast/pg";
import { fromPostgres } from "holdfast/postgres";
import { type Exact, accepted, number, postgresOnly } from "./race.ts";

const lockedTransaction: Exact = {
  title: "hf.transaction({ lock })",
  client: "pg",
  engines: postgresOnly,
  tables: { quota_image: "owner text NOT NULL, bytes int NOT NULL" },
  rows: [],
  correct: {
    actors({ pool }) {
      const hf = holdfast(fromPg(pool));
      const upload = (owner: string, bytes: number) =>
        hf.transaction({ lock: key("upload", owner) }, async ({ client }) => {
          const { rows } = await client.query(
            "SELECT coalesce(sum(bytes), 0)::int AS used FROM quota_image WHERE owner = $1",
            [owner],
          );
          if (rows[0].used + bytes > 100) throw new Error("Over quota");
          await client.query("INSERT INTO quota_image (owner, bytes) VALUES ($1, $2)", [owner, bytes]);
        });
      return { A: () => upload("ada", 60), B: () => upload("ada", 60) };
    },
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT sum(bytes) FROM quota_image"), 60, "bytes of 100");
    assert.equal(accepted(results), 1);
  },
};

const lockedTransactionPostgres: Exact = {
  title: "hf.transaction({ lock }) with postgres.js",
  client: "postgres",
  engines: postgresOnly,
  tables: { quota_note: "owner text NOT NULL" },
  rows: ["INSERT INTO quota_note VALUES ('ada')"],
  correct: {
    actors({ sql }) {
      const hf = holdfast(fromPostgres(sql));
      const write = (owner: string) =>
        hf.transaction({ lock: key("note", owner) }, async ({ client }) => {
          const notes = await client`SELECT owner FROM quota_note WHERE owner = ${owner}`;
          if (notes.length >= 2) throw new Error("Over quota");
          await client`INSERT INTO quota_note (owner) VALUES (${owner})`;
        });
      return { A: () => write("ada"), B: () => write("ada") };
    },
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM quota_note"), 2);
    assert.equal(accepted(results), 1);
  },
};

const lockedRows: Exact = {
  title: "tx.rows",
  client: "knex",
  engines: postgresOnly,
  tables: { coin_account: "id int PRIMARY KEY, coins int NOT NULL" },
  rows: ["INSERT INTO coin_account VALUES (1, 100), (2, 100)"],
  correct: {
    actors({ knex }) {
      const hf = holdfast(fromKnex(knex));
      const give = (from: number, to: number, coins: number) =>
        hf.transaction(async (tx) => {
          const [source] = await tx.rows<{ coins: number }>("coin_account", [from, to]);
          if (!source || source.coins < coins) throw new Error("Not enough");
          await tx.client("coin_account").where({ id: from }).decrement("coins", coins);
          await tx.client("coin_account").where({ id: to }).increment("coins", coins);
        });
      return { A: () => give(1, 2, 30), B: () => give(2, 1, 50) };
    },
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT coins FROM coin_account WHERE id = 1"), 120);
    assert.equal(accepted(results), 2);
  },
};

const versionedUpdate: Exact = {
  title: "versioned().update",
  client: "pg",
  engines: postgresOnly,
  tables: { hf_article: "id int PRIMARY KEY, views int NOT NULL, version int NOT NULL DEFAULT 0" },
  rows: ["INSERT INTO hf_article VALUES (1, 0)"],
  correct: {
    actors({ pool }) {
      const articles = versioned<{ id: number; views: number; version: number }>(
        holdfast(fromPg(pool)),
        "hf_article",
      );
      const view = (by: number) => articles.update(1, ({ views }) => ({ views: views + by }));
      return { A: () => view(1), B: () => view(2) };
    },
  },
  async invariant(clients) {
    assert.equal(await number(clients, "SELECT views FROM hf_article"), 3, "views");
  },
};

const onlyOnce: Exact = {
  title: "once",
  client: "pg",
  engines: postgresOnly,
  tables: { hf_credit: "account text NOT NULL, credits int NOT NULL" },
  rows: [],
  emptied: ["holdfast.once"],
  prepare: ({ pool }) => holdfast(fromPg(pool)).migrate(),
  correct: {
    actors({ pool }) {
      const hf = holdfast(fromPg(pool));
      const deliver = (event: string) =>
        once(hf, ["credits", event], async ({ client }) => {
          await client.query("INSERT INTO hf_credit (account, credits) VALUES ('ada', 5)");
          return { credited: 5 };
        });
      return { A: () => deliver("e1"), B: () => deliver("e1") };
    },
  },
  async invariant(clients, results) {
    assert.equal(await number(clients, "SELECT count(*) FROM hf_credit"), 1, "times that it was credited");
    assert.equal(accepted(results), 2);
  },
};

export const exactHoldfast: readonly Exact[] = [
  lockedTransaction,
  lockedTransactionPostgres,
  lockedRows,
  versionedUpdate,
  onlyOnce,
];
