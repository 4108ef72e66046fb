/** One process of many: uploads through one of the ORMs' examples. */
import type { Uploads } from "../../examples/uploads.ts";

export interface UploadArg {
  orm: string;
  url: string;
  user: string;
  uploads: number;
}

export default async function upload({ orm, url, user, uploads }: UploadArg): Promise<number> {
  const { open }: { open(url: string): Promise<Uploads> } = await import(`../../examples/${orm}/index.ts`);
  const app = await open(url);
  const answers = await Promise.all(Array.from({ length: uploads }, () => app.upload(user, 100)));
  await app.close();
  return answers.filter(Boolean).length;
}
