/** Odyssey, which lends sessions out per transaction, the one that came back first before the others. Debian has it in unstable only. */
import { existsSync } from "node:fs";
import { join } from "node:path";
import { type Command, startServer } from "../../packages/cli/src/server-process.ts";
import { fetched, fetchedCommand } from "./mysql.ts";
import { type StartedServer, answersPg } from "./started-server.ts";

export interface OdysseyOptions {
  readonly port: number;
  readonly password: string;
  /** Of sessions that it lends. */
  readonly size?: number;
}

async function program(): Promise<Command> {
  const usr = join(await fetched(), "usr");
  const file = join(usr, "bin/odyssey");
  if (!existsSync(file)) throw new Error(`there is no ${file}`);
  return fetchedCommand(usr, "bin/odyssey");
}

/** In front of every database of a server. */
export async function startOdyssey(server: OdysseyOptions): Promise<StartedServer> {
  const { file, args } = await program();
  const urlOf = (port: number): string => `postgres://postgres@127.0.0.1:${port}/postgres`;
  const started = await startServer({
    name: "odyssey",
    stopSignal: "TERM",
    async command(place, port) {
      const config = `daemonize no
log_to_stdout yes
log_format "%p %t %l [%i %s] (%c) %m\\n"
log_session no
coroutine_stack_size 24
listen {
  host "127.0.0.1"
  port ${port}
}
storage "server" {
  type "remote"
  host "127.0.0.1"
  port ${server.port}
}
database default {
  user default {
    authentication "none"
    storage "server"
    storage_user "postgres"
    storage_password "${server.password}"
    pool "transaction"
    pool_size ${server.size ?? 20}
  }
}
`;
      return { file, args: [...args, await place.write("odyssey.conf", config)] };
    },
    ready: (port) => answersPg(urlOf(port)),
  });
  return { url: urlOf(started.port), stop: started.stop };
}
