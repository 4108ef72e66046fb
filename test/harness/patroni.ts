/** Patroni: three PostgreSQLs, of which one leads, and etcd, which tells them who. */
import { existsSync, readFileSync } from "node:fs";
import { randomBytes } from "node:crypto";
import { join } from "node:path";
import { Client } from "pg";
import { type ServerProcess, freePort, startServer } from "../../packages/cli/src/server-process.ts";
import type { DebianPackage } from "./debian.ts";
import { OLD_HOME, oldBinaries } from "./old-postgres.ts";
import { type Proxy, startProxy } from "./proxy.ts";
import { eventually } from "./wait.ts";

const PATRONI = "/usr/bin/patroni";
const ETCD = "/usr/bin/etcd";

export const patroniPackages: readonly DebianPackage[] = [
  { name: "patroni", installed: () => existsSync(PATRONI) },
  { name: "etcd-server", installed: () => existsSync(ETCD) },
];

/** Why it cannot be started here. */
export function noPatroni(): string | undefined {
  const missing = patroniPackages.find((each) => !each.installed());
  if (missing) return `there is no ${missing.name}`;
  return oldBinaries() === undefined ? `there is no PostgreSQL before 17 in ${OLD_HOME}` : undefined;
}

export interface Node {
  readonly name: string;
  readonly port: number;
  url(): string;
  /** As if its machine had lost its power. It stays down. */
  crash(): void;
}

export interface Patroni {
  /** Where the leader is to be found: a proxy that passes on to whoever leads, as HAProxy does in front of Patroni. */
  readonly url: string;
  readonly nodes: readonly Node[];
  /** What is on its way stays there, and so does every answer, until somebody has taken over. */
  silence(): void;
  /** The one that leads, by what it says itself. */
  leader(): Promise<Node | undefined>;
  /** Resolves when another one leads, and connections go there. */
  takenOver(from: Node): Promise<Node>;
  readonly stop: () => Promise<void>;
}

export interface PatroniOptions {
  /** Whether COMMIT waits for a standby. */
  synchronous: boolean;
}

/** How long a leader that is not heard of stays leader, in seconds. */
const TTL = 6;

export async function startPatroni({ synchronous }: PatroniOptions): Promise<Patroni> {
  const why = noPatroni();
  if (why !== undefined) throw new Error(why);
  const stops: (() => Promise<void>)[] = [];
  const stop = async () => {
    // All at once: one that is left alone waits for the others.
    const [etcd, ...rest] = stops.splice(0);
    await Promise.all(rest.map((each) => each()));
    await etcd?.();
  };
  try {
    const etcd = await startEtcd();
    stops.push(etcd.stop);
    const password = randomBytes(12).toString("hex");
    const first = await startNode("one", { etcd: etcd.port, password, synchronous });
    stops.push(first.stop);
    const others = await Promise.all(
      ["two", "three"].map((name) => startNode(name, { etcd: etcd.port, password, synchronous })),
    );
    stops.push(...others.map((each) => each.stop));
    const nodes = [first, ...others];
    const target = { port: first.port };
    const proxy: Proxy = await startProxy(target);
    stops.push(() => proxy.close());
    const leader = async () => {
      const says = await Promise.all(nodes.map(({ rest }) => answers(rest, "/leader")));
      return nodes[says.indexOf(true)];
    };
    return {
      url: proxy.url(first.url()),
      nodes,
      silence: () => proxy.freeze(),
      leader,
      async takenOver(from) {
        let found: Node | undefined;
        await eventually(
          async () => {
            found = await leader();
            return found !== undefined && found !== from;
          },
          { timeout: 120_000, interval: 50 },
        );
        target.port = (found as Node).port;
        proxy.cut();
        proxy.thaw();
        return found as Node;
      },
      stop,
    };
  } catch (error) {
    await stop();
    throw error;
  }
}

async function startEtcd(): Promise<ServerProcess> {
  const peer = await freePort();
  return startServer({
    name: "etcd",
    stopSignal: "TERM",
    command: ({ dir }, port) => ({
      file: "/usr/bin/env",
      args: [
        // It does not start on arm64 without being told that this is known.
        `ETCD_UNSUPPORTED_ARCH=${process.arch}`,
        ETCD,
        `--data-dir=${join(dir, "data")}`,
        "--unsafe-no-fsync",
        `--listen-client-urls=http://127.0.0.1:${port}`,
        `--advertise-client-urls=http://127.0.0.1:${port}`,
        `--listen-peer-urls=http://127.0.0.1:${peer}`,
        `--initial-advertise-peer-urls=http://127.0.0.1:${peer}`,
        `--initial-cluster=default=http://127.0.0.1:${peer}`,
      ],
    }),
    async ready(port) {
      if (!(await answers(port, "/health"))) throw new Error("not healthy");
    },
  });
}

interface Started extends Node {
  /** The port of its own interface. */
  readonly rest: number;
  readonly stop: () => Promise<void>;
}

async function startNode(
  name: string,
  { etcd, password, synchronous }: { etcd: number; password: string; synchronous: boolean },
): Promise<Started> {
  const rest = await freePort();
  const server = await startServer({
    name: "patroni",
    stopSignal: "TERM",
    timeout: 120_000,
    async command(place, port) {
      const login = (username: string) => ({ username, password });
      const config = {
        scope: "holdfast",
        name,
        restapi: { listen: `127.0.0.1:${rest}`, connect_address: `127.0.0.1:${rest}` },
        etcd3: { host: `127.0.0.1:${etcd}` },
        bootstrap: {
          dcs: {
            ttl: TTL,
            loop_wait: 1,
            retry_timeout: 2,
            synchronous_mode: synchronous,
            postgresql: {
              use_pg_rewind: false,
              parameters: { fsync: "off", max_connections: 200, max_wal_senders: 10, wal_keep_size: "256MB" },
            },
          },
          initdb: [{ encoding: "UTF8" }, { locale: "C" }, "no-sync"],
          pg_hba: [
            "host all all 127.0.0.1/32 scram-sha-256",
            "host replication all 127.0.0.1/32 scram-sha-256",
          ],
        },
        postgresql: {
          listen: `127.0.0.1:${port}`,
          connect_address: `127.0.0.1:${port}`,
          data_dir: join(place.dir, "data"),
          bin_dir: oldBinaries(),
          pgpass: join(place.dir, "pgpass"),
          authentication: { superuser: login("postgres"), replication: login("replicator") },
          parameters: { unix_socket_directories: place.dir, password_encryption: "scram-sha-256" },
        },
        watchdog: { mode: "off" },
      };
      // JSON is YAML.
      return { file: PATRONI, args: [await place.write("patroni.json", JSON.stringify(config))] };
    },
    async ready() {
      if (!(await answers(rest, name === "one" ? "/leader" : "/replica"))) throw new Error("not ready");
    },
  });
  const url = () => `postgres://postgres:${password}@127.0.0.1:${server.port}/postgres`;
  return {
    name,
    port: server.port,
    rest,
    url,
    crash() {
      const [postmaster = ""] = readFileSync(join(server.dir, "data/postmaster.pid"), "utf8").split("\n");
      for (const pid of [server.pid, Number(postmaster)]) process.kill(pid, "SIGKILL");
    },
    stop: server.stop,
  };
}

async function answers(port: number, path: string): Promise<boolean> {
  try {
    const response = await fetch(`http://127.0.0.1:${port}${path}`, { signal: AbortSignal.timeout(5000) });
    await response.body?.cancel();
    return response.status === 200;
  } catch {
    return false;
  }
}

/** Whether the leader has standbys that are with it. */
export async function standbys(url: string): Promise<{ streaming: number; synchronous: number }> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    const { rows } = await client.query(
      "SELECT count(*)::int AS streaming, count(*) FILTER (WHERE sync_state IN ('sync', 'quorum'))::int AS synchronous FROM pg_stat_replication WHERE state = 'streaming'",
    );
    return rows[0];
  } finally {
    await client.end();
  }
}
