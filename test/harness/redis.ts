import { existsSync } from "node:fs";
import { connect } from "node:net";
import { startServer } from "../../packages/cli/src/server-process.ts";
import { type DebianPackage, installMissing } from "./debian.ts";

const SERVER = "/usr/bin/redis-server";

const redisPackage: DebianPackage = { name: "redis-server", installed: () => existsSync(SERVER) };

export interface RedisServer {
  readonly port: number;
  readonly version: string;
  stop(): Promise<void>;
}

/** "always": each write is on the disk before it is answered, as a COMMIT is. "default": as the package comes. */
export async function startRedis(durability: "always" | "default"): Promise<RedisServer> {
  await installMissing([redisPackage]);
  if (!redisPackage.installed()) throw new Error(`${SERVER} is not installed`);
  const server = await startServer({
    name: "redis",
    stopSignal: "TERM",
    command: ({ dir }, port) => ({
      file: SERVER,
      args: [
        "--port",
        String(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        dir,
        ...(durability === "always" ? ["--appendonly", "yes", "--appendfsync", "always"] : []),
      ],
    }),
    ready: async (port) => void (await info(port)),
  });
  const version = /redis_version:(\S+)/.exec(await info(server.port))?.[1] ?? "unknown";
  return { port: server.port, version, stop: server.stop };
}

function info(port: number): Promise<string> {
  return new Promise((resolve, reject) => {
    const socket = connect(port, "127.0.0.1", () => socket.write("INFO server\r\n"));
    let text = "";
    socket.on("data", (chunk) => {
      text += String(chunk);
      if (!text.includes("redis_version")) return;
      socket.destroy();
      resolve(text);
    });
    socket.on("error", reject);
  });
}
