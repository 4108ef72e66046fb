/**
 * Quota, stock and queue on MySQL, MariaDB and SQLite, each next to what a careful programmer writes by hand for that engine, in the
 * same run on the same server or file. Ours also knows an id again, and keeps a chain of versions and balances.
 */
import { readFile } from "node:fs/promises";
import { startMariadb } from "../../../test/harness/mariadb.ts";
import { startMysql } from "../../../test/harness/mysql.ts";
import { type BenchRow, type Report, type SuiteOptions, machine } from "../report.ts";
import { type MysqlSettings, mysqlGround } from "./patterns-mysql.ts";
import { type PatternGround, race } from "./patterns-race.ts";
import { sqliteGround } from "./patterns-sqlite.ts";

/** What was aimed at. */
const wanted = {
  mysql_quota_hot: 15,
  mariadb_quota_hot: 15,
  sqlite_quota_hot: 3,
  mysql_quota_spread: 4,
  mariadb_quota_spread: 4,
  mysql_stock_hot: 8,
  mysql_drain: 20,
  mariadb_drain: 20,
  sqlite_drain_vs_best: 2,
  mysql_long_life: 0.9,
  mariadb_long_life: 0.9,
  sqlite_long_life: 0.9,
};

const flushed = "--innodb-flush-log-at-trx-commit=1";

const mysql: MysqlSettings = {
  name: "MySQL",
  prefix: "mysql",
  start: startMysql,
  asItComes: [flushed, "--innodb-doublewrite=ON"],
  about: "COMMIT is flushed, doublewrite is on; no binary log, which would add a flush to each COMMIT",
  wanted,
};

const mariadb: MysqlSettings = {
  name: "MariaDB",
  prefix: "mariadb",
  start: startMariadb,
  asItComes: [flushed],
  about: "COMMIT is flushed; no binary log",
  wanted,
};

const grounds: Readonly<Record<string, () => Promise<PatternGround>>> = {
  mysql: () => mysqlGround(mysql),
  mariadb: () => mysqlGround(mariadb),
  sqlite: () => sqliteGround(wanted),
};

async function versionOf(name: string): Promise<string> {
  const text = await readFile(new URL("../../package.json", import.meta.url), "utf8");
  return (JSON.parse(text) as { dependencies: Record<string, string> }).dependencies[name] ?? "unknown";
}

export async function run({ seconds, note, only }: SuiteOptions): Promise<Report> {
  const rows: BenchRow[] = [];
  const ratios: Record<string, number> = {};
  const abouts: string[] = [];
  const short: string[] = [];
  for (const [name, make] of Object.entries(grounds)) {
    if (only.length > 0 && !only.includes(name)) continue;
    note(`${name}: starting …`);
    await using ground = await make();
    for (const cell of ground.cells) {
      note(`${ground.name}: ${cell.name} …`);
      const result = await race(ground.name, cell, seconds);
      rows.push(...result.rows);
      Object.assign(ratios, result.ratios);
      short.push(...result.short);
      for (const [ratio, value] of Object.entries(result.ratios)) note(`  ${ratio} ${value}`);
    }
    await ground.check();
    abouts.push(ground.about);
  }
  return {
    suite: "patterns",
    machine: machine("none"),
    rows,
    ratios,
    notes: [
      ...abouts,
      `cpuUs: processor time of an operation, of this process, the server and all others that take part. statements: those that the server was sent for an operation. plainjob ${await versionOf("plainjob")}; pg-boss has no backend for SQLite.`,
      "p50 and p99 of a drain: from the start of one job to the start of the hundredth after it. A ratio is the median of its rounds.",
      ...short,
    ],
  };
}
