/** The database that scenarios are made on. */
import { type EmbeddedPostgres, startPostgres } from "../embedded.ts";
import { type Given, given, withoutSecrets } from "../url.ts";

export interface PlaceOptions {
  readonly url?: string | undefined;
  readonly say: (note: string) => void;
}

/** One that was named, or a server of our own with a new database for each scenario; it starts when it is needed. */
export class Place implements AsyncDisposable {
  readonly #given: Given | undefined;
  readonly #say: (note: string) => void;
  #server: Promise<EmbeddedPostgres> | undefined;
  #said = false;
  #databases = 0;

  constructor({ url, say }: PlaceOptions) {
    this.#given = given(url);
    this.#say = say;
  }

  async url(): Promise<string> {
    if (this.#given) {
      if (!this.#said) this.#say(`On ${withoutSecrets(this.#given.url)} (${this.#given.by}).`);
      this.#said = true;
      return this.#given.url;
    }
    this.#server ??= this.#start();
    const server = await this.#server;
    const name = `race_${++this.#databases}`;
    await server.createDatabase(name);
    return server.url(name);
  }

  #start(): Promise<EmbeddedPostgres> {
    this.#say("No --url, HOLDFAST_URL or DATABASE_URL: on a PostgreSQL of its own.");
    // Nothing of it has to outlive the power, and every run commits.
    return startPostgres({
      settings: { fsync: "off", full_page_writes: "off", synchronous_commit: "off" },
    });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const server = await this.#server?.catch(() => undefined);
    await server?.stop();
  }
}
