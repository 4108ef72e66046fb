/** The same with Node's own runner. */
import assert from "node:assert/strict";
import { after, test } from "node:test";
import { fromPg } from "holdfast/pg";
import { expectNoRace } from "holdfast/testing";
import { Pool } from "pg";

const pool = new Pool({ connectionString: process.env["DATABASE_URL"], max: 4 });
after(() => pool.end());

const left = async () => Number((await pool.query("SELECT uses FROM voucher")).rows[0].uses);

async function naive(): Promise<boolean> {
  const uses = await left();
  if (uses < 1) return false;
  await pool.query("UPDATE voucher SET uses = $1", [uses - 1]);
  return true;
}

async function exact(): Promise<boolean> {
  return (await pool.query("UPDATE voucher SET uses = uses - 1 WHERE uses >= 1")).rowCount === 1;
}

const usedOnce = ({ A, B }: Record<string, PromiseSettledResult<unknown>>) =>
  assert.equal([A, B].filter((each) => each?.status === "fulfilled" && each.value).length, 1);

void test("exact", async () => void (await expectNoRace(fromPg(pool), [exact, exact], usedOnce)));
void test("naive", async () => void (await expectNoRace(fromPg(pool), [naive, naive], usedOnce)));
