/** A handler of messages that pays 10, and one that counts under a lease. */
import { DatabaseSync } from "node:sqlite";
import Database from "better-sqlite3";
import { type Holdfast, type Lease, fenced, holdfast, key, once } from "holdfast";
import { fromBetterSqlite3 } from "holdfast/better-sqlite3";
import { fromNodeSqlite } from "holdfast/node-sqlite";
import { opened } from "./opened.ts";

type Library = "better-sqlite3" | "node:sqlite";
/** What both have. */
interface Handle {
  exec(text: string): unknown;
}

const open = (library: Library, file: string): Handle =>
  library === "node:sqlite" ? new DatabaseSync(file, { timeout: 5000 }) : new Database(file);
const handles = {
  "better-sqlite3": opened((file) => open("better-sqlite3", file)),
  "node:sqlite": opened((file) => open("node:sqlite", file)),
};
const exact = {
  "better-sqlite3": opened<Holdfast<Handle>>((file) => holdfast(fromBetterSqlite3(() => new Database(file)))),
  "node:sqlite": opened<Holdfast<Handle>>((file) =>
    holdfast(fromNodeSqlite(() => new DatabaseSync(file, { timeout: 5000 }))),
  ),
};

const pay = ["INSERT INTO payment (amount) VALUES (10)", "UPDATE account SET balance = balance + 10"];

export async function naive(library: Library, file: string): Promise<void> {
  const db = handles[library](file);
  for (const text of ["BEGIN IMMEDIATE", ...pay, "COMMIT"]) db.exec(text);
}

export async function steps(library: Library, file: string): Promise<void> {
  for (const text of pay) handles[library](file).exec(text);
}

export async function withOnce(library: Library, file: string): Promise<void> {
  await once(exact[library](file), "message 7", async (tx) => {
    for (const text of pay) tx.client.exec(text);
  });
}

async function counted(file: string, write: (n: number, lease: Lease) => unknown): Promise<void> {
  const db = new Database(file);
  const lease = await exact["better-sqlite3"](file).lease(key("report"), {
    wait: 30_000,
    renew: false,
    ttl: 60_000,
  });
  try {
    const n = db.prepare<[], number>("SELECT balance FROM account").pluck().get() ?? 0;
    await write(n + 1, lease);
  } finally {
    await lease.release().catch(() => {});
    db.close();
  }
}

export async function late(file: string): Promise<void> {
  await counted(file, (n) => handles["better-sqlite3"](file).exec(`UPDATE account SET balance = ${n}`));
}

export async function refused(file: string): Promise<void> {
  await counted(file, (n, lease) =>
    exact["better-sqlite3"](file).transaction(async (tx) => {
      await fenced(tx, lease);
      tx.client.exec(`UPDATE account SET balance = ${n}`);
    }),
  );
}
