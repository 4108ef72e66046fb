import { holdfast, key } from "holdfast";
import { fromSequelize } from "holdfast/sequelize";
import {
  type CreationOptional,
  DataTypes,
  type InferAttributes,
  type InferCreationAttributes,
  type Model,
  Sequelize,
} from "sequelize";
import { type Uploads, patient, quotaBytes, start } from "../uploads.ts";

interface UserImage extends Model<InferAttributes<UserImage>, InferCreationAttributes<UserImage>> {
  id: CreationOptional<string>;
  userId: string;
  bytes: number;
}

export async function open(url: string): Promise<Uploads> {
  const sequelize = new Sequelize(url, { logging: false });
  const images = sequelize.define<UserImage>(
    "user_image",
    {
      id: { type: DataTypes.BIGINT, primaryKey: true, autoIncrement: true },
      userId: { type: DataTypes.TEXT, allowNull: false },
      bytes: { type: DataTypes.INTEGER, allowNull: false },
    },
    { tableName: "user_image", underscored: true, timestamps: false },
  );
  const hf = holdfast(fromSequelize(sequelize), patient);
  return {
    upload: (userId, bytes) =>
      hf.transaction({ lock: key("upload", userId) }, async ({ client: transaction }) => {
        const used = await images.sum("bytes", { where: { userId }, transaction });
        if (used + bytes > quotaBytes) return false;
        await images.create({ userId, bytes }, { transaction });
        return true;
      }),
    async close() {
      await hf.close();
      await sequelize.close();
    },
  };
}

await start(import.meta.url, open);
