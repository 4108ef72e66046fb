/** `--proxy`: an application in another process, which connects by way of this one. */
import { type Proxy, proxied } from "holdfast/testing";
import { kindOf } from "../server.ts";

export class Relay {
  readonly #port: number;
  #open: { readonly url: string; readonly proxy: Proxy } | undefined;

  constructor(port: number) {
    this.#port = port;
  }

  /** The one for this database. It stays until there is another database, so that the application's connections do too. */
  async to(url: string): Promise<Proxy> {
    if (this.#open?.url !== url) {
      await this.close();
      this.#open = { url, proxy: await proxied(await databaseAt(url), url, { port: this.#port }) };
    }
    return this.#open.proxy;
  }

  async close(): Promise<void> {
    await this.#open?.proxy.close();
    this.#open = undefined;
  }
}

/** Nobody asks it anything: it says what is spoken there. */
async function databaseAt(url: string) {
  if (kindOf({ url, by: "--url" }) === "postgres") {
    const [{ Pool }, { fromPg }] = await Promise.all([import("pg"), import("holdfast/pg")]);
    return fromPg(new Pool({ connectionString: url }));
  }
  const [mysql, { fromMysql2 }] = await Promise.all([import("mysql2/promise"), import("holdfast/mysql2")]);
  return fromMysql2(mysql.createPool({ uri: url }));
}
