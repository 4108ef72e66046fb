/** What doctor makes of servers that cannot be had here, by what they say of themselves. */
import { describe, expect, test } from "vitest";
import type { Check } from "../../packages/cli/src/doctor/check.ts";
import { mariadbChecks, mysqlChecks } from "../../packages/cli/src/doctor/mysql/index.ts";
import type { MysqlPatient } from "../../packages/cli/src/doctor/mysql/patient.ts";
import { postgresChecks } from "../../packages/cli/src/doctor/postgres/index.ts";
import type { PostgresPatient } from "../../packages/cli/src/doctor/postgres/patient.ts";
import { sqliteChecks } from "../../packages/cli/src/doctor/sqlite/index.ts";
import type { SqlitePatient } from "../../packages/cli/src/doctor/sqlite/patient.ts";

/** Which of the checks finds something. */
async function found<P>(checks: readonly Check<P>[], patient: Partial<P>): Promise<string[]> {
  const ids: string[] = [];
  for (const { id, run } of checks)
    if (
      ["version", "look-alike", "galera", "group-replication"].includes(id) &&
      (await run(patient as P)).length > 0
    )
      ids.push(id);
  return ids;
}

describe("PostgreSQL", () => {
  const at = (version: string, number: number) =>
    found(postgresChecks, { me: { version, number } as PostgresPatient["me"] });

  test.each([
    ["PostgreSQL 18.4 on aarch64-unknown-linux-gnu, compiled by gcc, 64-bit", 180_004, []],
    ["PostgreSQL 14.0 on x86_64-pc-linux-musl", 140_000, []],
    ["PostgreSQL 13.22 (Debian 13.22-1.pgdg120+1)", 130_022, ["version"]],
    ["PostgreSQL 9.6.24 on x86_64", 90_624, ["version"]],
    ["CockroachDB CCL v24.3.1 (x86_64-pc-linux-gnu)", 130_000, ["version", "look-alike"]],
    ["PostgreSQL 16 (Aurora DSQL)", 160_000, ["look-alike"]],
    ["PostgreSQL 15.2-YB-2.25.0.0-b0 on x86_64", 150_002, ["look-alike"]],
  ])("%s", async (version, number, expected) => {
    expect(await at(version, number)).toEqual(expected);
  });
});

describe.each([
  ["MySQL", mysqlChecks, false],
  ["MariaDB", mariadbChecks, true],
] as const)("%s", (_, checks, maria) => {
  const at = (version: string, full: string, settings: readonly (readonly [string, string])[] = []) =>
    found<MysqlPatient>(checks, { maria, version, full, settings: async () => new Map(settings) });

  test("versions", async () => {
    const [old, least] = maria ? ["10.5.29", "10.6.0"] : ["8.0.35", "8.0.36"];
    expect(await at(old, old)).toEqual(["version"]);
    expect(await at(least, least)).toEqual([]);
  });

  test("look-alikes, and a node of a cluster", async () => {
    const [version] = maria ? ["11.8.2"] : ["9.4.0"];
    for (const full of [`${version}-Vitess`, `${version}-TiDB-v8.5.1`])
      expect(await at(version, full), full).toContain("look-alike");
    expect(await at(version, version, [["wsrep_on", "ON"]])).toEqual(["galera"]);
    expect(await at(version, version, [["wsrep_on", "OFF"]])).toEqual([]);
    const single = "group_replication_single_primary_mode";
    expect(await at(version, version, [[single, "OFF"]])).toEqual(["group-replication"]);
    expect(await at(version, version, [[single, "ON"]])).toEqual([]);
  });
});

test("SQLite", async () => {
  expect(await found<SqlitePatient>(sqliteChecks, { version: "3.37.2" })).toEqual(["version"]);
  expect(await found<SqlitePatient>(sqliteChecks, { version: "3.38.0" })).toEqual([]);
  expect(await found<SqlitePatient>(sqliteChecks, { version: "3.50.4" })).toEqual([]);
});
