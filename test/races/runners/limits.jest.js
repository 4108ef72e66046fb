/** A green one, one with a race in it, more than can be tried, and the next one: in Jest, whose modules have a world of their own. */
import { afterAll, expect, test } from "@jest/globals";
import { fromPg } from "holdfast/pg";
import { RaceError, expectNoRace, explore } from "holdfast/testing";
import { Pool } from "pg";

const pool = new Pool({ connectionString: process.env.DATABASE_URL, max: 4 });
afterAll(() => pool.end());

const reset = () => pool.query("UPDATE voucher SET uses = 1");
const exact = async () =>
  (await pool.query("UPDATE voucher SET uses = uses - 1 WHERE uses >= 1")).rowCount === 1;
const naive = async () => {
  const { rows } = await pool.query("SELECT uses FROM voucher");
  if (rows[0].uses < 1) return false;
  await pool.query("UPDATE voucher SET uses = $1", [rows[0].uses - 1]);
  return true;
};
const usedOnce = ({ A, B }) =>
  expect([A, B].filter((each) => each?.status === "fulfilled" && each.value).length).toBe(1);

test("exact", async () => {
  await reset();
  await expectNoRace(fromPg(pool), [exact, exact], usedOnce);
});

test("naive", async () => {
  await expectNoRace(fromPg(pool), [naive, naive], usedOnce, { reset });
});

test("naive, and the error is one of its class, with what the invariant threw", async () => {
  const error = await expectNoRace(fromPg(pool), [naive, naive], usedOnce, { reset }).catch(
    (thrown) => thrown,
  );
  expect(error).toBeInstanceOf(RaceError);
  expect(error.report.error.message).toContain("toBe(expected)");
});

test("more than can be tried", async () => {
  const many = async () => {
    for (let i = 0; i < 6; i++) await pool.query("UPDATE voucher SET uses = uses + 1");
  };
  await expectNoRace(fromPg(pool), [many, many], () => {}, { reset, minCoverage: 0 });
});

test("what goes wrong is told", async () => {
  const refused = async () => {
    await pool.query("UPDATE voucher SET uses = NULL");
  };
  await expect(
    explore("refused", { db: fromPg(pool), reset, actors: { A: refused, B: refused }, invariant: () => {} }),
  ).rejects.toThrow(/every actor threw in every run.*null value in column "uses"/);
});

test("the next one", async () => {
  await expectNoRace(fromPg(pool), [exact, exact], usedOnce, { reset, name: "the next one" });
});
