import { expect, test } from "vitest";
import { isSupported } from "../../packages/holdfast/src/core/capabilities.ts";
import type { ClientTraits, Row, SqlConnection } from "../../packages/holdfast/src/core/database.ts";
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
      if (text.startsWith("SHOW VARIABLES"))
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
  expect(found.transactionLocks).toBe("lock row");
  expect(isSupported(found.versions) && isSupported(found.once)).toBe(true);
  for (const support of [found.sessionLocks, found.rowLocks, found.leases])
    expect(support).toMatchObject({ supported: false, why: expect.stringContaining("Galera") as string });
});

test("on Vitess sessions have no locks", async () => {
  const found = await probe(server("8.4.6-Vitess"));
  expect(found.sessionLocks).toMatchObject({ supported: false });
  expect(found.transactionLocks).toBe("lock row");
});

test("replicas, old servers and connections without a database are refused", async () => {
  await expect(probe(server("8.4.3", {}, { readonly: 1 }))).rejects.toMatchObject({ code: "HF_REPLICA" });
  await expect(probe(server("8.4.3", { innodb_read_only: "ON" }))).rejects.toMatchObject({
    code: "HF_REPLICA",
  });
  for (const version of ["5.7.44", "8.0.36", "8.3.0", "10.5.22-MariaDB"])
    await expect(probe(server(version))).rejects.toMatchObject({ code: "HF_SERVER_TOO_OLD" });
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
