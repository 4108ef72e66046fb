import { expect, test } from "vitest";
import { isSupported } from "../../packages/holdfast/src/seam/capabilities.ts";
import type { ClientTraits, Row, SqlConnection } from "../../packages/holdfast/src/seam/database.ts";
import { mysql, render } from "../../packages/holdfast/src/engines/mysql/index.ts";

const traits: ClientTraits = {
  client: "fake",
  cancel: true,
  listen: false,
  embedded: false,
  single: false,
  pinned: true,
  begins: false,
};

/** A server that answers the questions of the probe, and no others. */
function server(version: string, variables: Record<string, string> = {}, row: Row = {}): SqlConnection {
  return {
    lost: new AbortController().signal,
    async query(statement) {
      const { text } = render(statement);
      if (text.startsWith("SHOW GLOBAL VARIABLES"))
        return {
          rows: Object.entries(variables).map(([name, value]) => ({ Variable_name: name, Value: value })),
          affected: 0,
        };
      return { rows: [{ version, readonly: 0, db: "shop", ...row }], affected: 0 };
    },
  };
}

const probe = (connection: SqlConnection) => mysql.probe(connection, traits);

test("a server alone has locks of every kind", async () => {
  for (const [version, flavour] of [
    ["8.4.3", "mysql"],
    ["9.7.4-2", "mysql"],
    ["10.6.18-MariaDB-log", "mariadb"],
    ["11.8.2-MariaDB", "mariadb"],
  ] as const)
    expect(await probe(server(version, { wsrep_on: "OFF" }))).toMatchObject({
      flavour,
      exclusion: "held",
      transactionLocks: "lock row",
      joinedLocks: "lock row",
      sessionLocks: "session advisory",
      rowLocks: ["update", "share"],
      leases: true,
      versions: true,
      once: true,
    });
});

test("on a Galera cluster only what survives a COMMIT on another node is given", async () => {
  const found = await probe(server("10.11.19-MariaDB", { wsrep_on: "ON" }));
  expect(found).toMatchObject({ transactionLocks: "lock row", exclusion: "at commit" });
  expect(found.isolation).not.toContain("serializable");
  expect(isSupported(found.versions) && isSupported(found.once)).toBe(true);
  for (const support of [found.sessionLocks, found.rowLocks, found.leases])
    expect(support).toMatchObject({ supported: false, why: expect.stringContaining("Galera") as string });
});

test("a group with several primaries has versions only, and one with a single primary everything", async () => {
  const single = "group_replication_single_primary_mode";
  for (const value of ["ON", "1"])
    expect(await probe(server("9.4.0", { [single]: value }))).toMatchObject({
      exclusion: "held",
      transactionLocks: "lock row",
      sessionLocks: "session advisory",
      leases: true,
    });
  const found = await probe(server("9.4.0", { [single]: "OFF" }));
  expect(found).toMatchObject({ exclusion: "at commit", versions: true });
  const { transactionLocks, joinedLocks, sessionLocks, rowLocks, leases, once } = found;
  for (const support of [transactionLocks, joinedLocks, sessionLocks, rowLocks, leases, once])
    expect(support).toMatchObject({
      supported: false,
      why: expect.stringContaining("several primaries") as string,
    });
});

test("what the nodes of clusters say of conflicts, and of themselves", () => {
  const classify = (errno: number, message: string) => mysql.classify({ errno, message } as never);
  const deadlock = "Got error 149 - 'Lock deadlock; Retry transaction' during COMMIT";
  expect(classify(1180, deadlock)).toBe("serialization");
  expect(classify(1180, "Got error 28 - 'No space left on device' during COMMIT")).toBe("full");
  expect(classify(1181, "Got error 153 - 'No savepoint with that name' during ROLLBACK")).toBe(
    "serialization",
  );
  expect(classify(3101, "Plugin instructed the server to rollback the current transaction.")).toBe(
    "serialization",
  );
  expect(classify(1047, "WSREP has not yet prepared node for application use")).toBe("unavailable");
  expect(classify(1047, "Unknown command")).toBeUndefined();
});

test("on Vitess sessions have no locks", async () => {
  const found = await probe(server("8.4.6-Vitess"));
  expect(found.sessionLocks).toMatchObject({ supported: false });
  expect(found.transactionLocks).toBe("lock row");
});

test("what only answers like MySQL is refused by its name, whatever its number", async () => {
  for (const at of [
    server("8.0.11-TiDB-v8.5.1"),
    server("8.0.40", { version_comment: "TiDB Server (Apache License 2.0)" }),
    server("5.7.25-OceanBase-v4.3.5"),
  ])
    await expect(probe(at)).rejects.toThrow(/^(TiDB|OceanBase) answers like MySQL/);
});

test("replicas, old servers and connections without a database are refused", async () => {
  await expect(probe(server("8.4.3", {}, { readonly: 1 }))).rejects.toMatchObject({ code: "HF_REPLICA" });
  await expect(probe(server("8.4.3", { innodb_read_only: "ON" }))).rejects.toMatchObject({
    code: "HF_REPLICA",
  });
  for (const version of ["5.7.44", "8.0.35", "8.0.mysql_aurora.3.02.0", "10.5.22-MariaDB"])
    await expect(probe(server(version))).rejects.toMatchObject({ code: "HF_SERVER_TOO_OLD" });
  for (const version of ["8.0.36", "8.0.45-1", "8.1.0", "10.6.0-MariaDB-log"])
    await expect(probe(server(version))).resolves.toMatchObject({ version });
  await expect(probe(server("8.4.3", {}, { db: null }))).rejects.toMatchObject({ code: "HF_UNSUPPORTED" });
});

test("a strategy that is not there is refused", async () => {
  await expect(mysql.probe(server("8.4.3"), traits, "transaction advisory")).rejects.toMatchObject({
    code: "HF_UNSUPPORTED",
  });
  expect(await mysql.probe(server("8.4.3"), traits, "lock row")).toMatchObject({
    transactionLocks: "lock row",
  });
});
