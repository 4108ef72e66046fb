/** More than can be tried, and a lock of somebody else: each ends by itself, with its reason, before the runner's 5 s. */
import { fromPg } from "holdfast/pg";
import { expectNoRace } from "holdfast/testing";
import { Client, Pool } from "pg";
import { afterAll, expect, test } from "vitest";

const connectionString = process.env["DATABASE_URL"];
const pool = new Pool({ connectionString, max: 4 });
afterAll(() => pool.end());

const reset = () => pool.query("UPDATE voucher SET uses = 1");
const exact = async () =>
  (await pool.query("UPDATE voucher SET uses = uses - 1 WHERE uses >= 1")).rowCount === 1;
const usedOnce = ({ A, B }: Record<string, PromiseSettledResult<unknown>>) =>
  expect([A, B].filter((each) => each?.status === "fulfilled" && each.value).length).toBe(1);

test("more than can be tried", async () => {
  const many = async () => {
    for (let i = 0; i < 6; i++) await pool.query("UPDATE voucher SET uses = uses + 1");
  };
  await expectNoRace(fromPg(pool), [many, many], () => {}, { reset, minCoverage: 0 });
});

test("a lock of somebody else", async () => {
  const other = new Client({ connectionString });
  await other.connect();
  try {
    await other.query("BEGIN; UPDATE voucher SET uses = 1");
    await expect(
      expectNoRace(fromPg(pool), [exact, exact], usedOnce, { reset: async () => {} }),
    ).rejects.toThrow(/a lock that no actor has/);
  } finally {
    await other.end();
  }
});

test("the next one", async () => {
  await expectNoRace(fromPg(pool), [exact, exact], usedOnce, { reset, name: "the next one" });
});
